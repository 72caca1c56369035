r"""Everything about a GPU in one program and one document, in minutes:

    exact         gather and scatter, byte for byte
    codes         fp8 kernels and checksums, byte for byte
    copies        gather and scatter, next to a device copy
    code speed    fp8 kernels and checksums, likewise
    link          pages to slots and back through a Transfer, next to one plain pinned copy
    interference  a decode loop with and without write-down at full rate
    hits          a Llama in transformers: computed, hit in DRAM, hit on NVMe
    sanitizer     the kernels under compute-sanitizer, where it is installed

Yardsticks are measured in the same rounds. A section that fails is told of, and the others go on.

On a machine that has torch, CuPy, transformers and a GPU, but no network and no rootcellar, take a
checkout there with the wheels of what else is missing, made beforehand where there is a network:

    pip download --no-deps --only-binary=:all: --python-version 3.12 \
        --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 -d wheels lmdb zstandard

and there, in the checkout:

    pip install --no-index --no-deps --target /tmp/site wheels/*.whl
    ln -s "$PWD/rootcellar" /tmp/site/
    export PYTHONPATH=/tmp/site
    python3 -P -c 'from rootcellar.cli import main; main()' bench device --json > device.json

-P keeps the checkout itself off the path, where our kernels/ would hide another package's.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch

from .device_budget import Budget, Part, Progress
from .device_facts import device_to_measure, facts
from .device_scale import DRY, FULL, Scale
from .device_section import Findings, Row, Section, Site
from .device_table import table

__all__ = ["run", "table"]

MINUTES = 8.0

SECTIONS = {
    "exact": ("device_exact", "measure", 4),
    "codes": ("device_codes", "measure", 2),
    "copies": ("device_speed", "copies", 12),
    "code speed": ("device_speed", "codes", 4),
    "link": ("device_link", "measure", 30),
    "interference": ("device_interference", "measure", 20),
    "hits": ("device_hits", "measure", 14),
    "sanitizer": ("device_sanitizer", "measure", 14),
}
"""Module, function and share of the time, in the order they run."""


def run(
    directory: Path | None = None,
    *,
    minutes: float = MINUTES,
    dry_run: bool = False,
    seed: int = 0,
    scale: Scale | None = None,
    command: Sequence[str] = (),
    progress: Progress | None = None,
    ended: Callable[[Row], None] | None = None,
) -> dict[str, Any]:
    """Every section, within about `minutes`, files in a temporary folder of `directory`.

    dry_run: on the CPU, in small, to see that all of it runs; no speed is judged.
    scale: other than the usual. ended: called with each section as it ends.

    Returns a JSON document; `num_failed` counts sections that raised, or found bytes that differ.
    ValueError for a wrong argument, or says what is missing to measure a GPU.
    """
    where = Path() if directory is None else directory
    if not where.is_dir():
        raise ValueError(f"directory is {where}, must be an existing directory")
    if not minutes > 0:
        raise ValueError(f"minutes is {minutes}, must be above 0")
    if seed < 0:
        raise ValueError(f"seed is {seed}, must be at least 0")
    device = device_to_measure(dry_run=dry_run)
    site = Site(
        device=device, directory=where, seed=seed, scale=scale or (DRY if dry_run else FULL)
    )
    start_s = time.perf_counter()
    document: dict[str, Any] = {
        "benchmark": "device",
        "dry_run": dry_run,
        "command": list(command),
        "seed": seed,
        "minutes": minutes,
        "environment": facts(device),
    }
    shares = {name: share for name, (_, _, share) in SECTIONS.items()}
    budget = Budget(minutes * 60, shares, progress)
    with _quiet_cpu(dry_run):
        sections = list[Row]()
        for name in SECTIONS:
            sections.append(_run_section(name, site, budget.begin(name)))
            if ended is not None:
                ended(sections[-1])
    return document | {
        "taken_s": time.perf_counter() - start_s,
        "num_failed": sum(section["status"] == "failed" for section in sections),
        "sections": sections,
    }


def _run_section(name: str, site: Site, part: Part) -> Row:
    """Whatever goes wrong inside is the section's own."""
    try:
        _release(site)
        found, error = _section(name)(site, part), ""
    except Exception as raised:
        found, error = Findings(), "".join(traceback.format_exception(raised))
    part.end()
    status = "failed" if error or found.wrong else "skipped" if found.skipped else "done"
    return {
        "name": name,
        "status": status,
        "taken_s": part.taken_s,
        "error": error,
        "wrong": found.wrong,
        "skipped": found.skipped,
        "notes": found.notes,
        "targets": [target.as_row(dry_run=not site.on_gpu) for target in found.targets],
        "rows": found.rows,
    }


def _release(site: Site) -> None:
    """Give back the memory that torch keeps of what a section before this one had."""
    gc.collect()
    if site.on_gpu:
        torch.cuda.empty_cache()


@contextmanager
def _quiet_cpu(dry_run: bool) -> Iterator[None]:
    """One thread for what is small: on a busy machine, several wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if dry_run else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _section(name: str) -> Section:
    """Imported when it runs: what one of them cannot import is no other's failure."""
    module, function, _ = SECTIONS[name]
    return cast("Section", getattr(import_module(f".{module}", __package__), function))
