"""`rootcellar tune` as it is called: words become a question, and the answer may become a page."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ...tiers.config import parse_bytes
from .budget import NO_BUDGET, Budget
from .device import Device
from .models import kv_shape
from .run import DEFAULT_POLICIES, Document, Question, answer
from .sizes import SWEEP, Sizes
from .stretch import Progress
from .view import view

__all__ = ["run", "view"]


def run(
    traces: Sequence[Path],
    *,
    model: str,
    kv_dtype: str = "auto",
    device: Sequence[str] = (),
    shares: Sequence[float] = (),
    nvme_shares: Sequence[float] = (),
    hbm: str = "0",
    dram: str = "0",
    nvme: str = "0",
    sweep: bool = False,
    policies: Sequence[str] = (),
    seeds: int = 1,
    write_budget: str | None = None,
    out: Path | None = None,
    command: Sequence[str],
    progress: Progress,
) -> Document:
    """The document; `out` gets it as a page. ValueError or OSError, before any replay, names what
    is wrong with an argument."""
    question = Question(
        traces=traces,
        model=kv_shape(model, kv_dtype),
        device=Device.parse(dict(_field(text) for text in device)),
        sizes=Sizes(
            shares=[*shares, *(SWEEP if sweep else ())],
            nvme_shares=nvme_shares,
            hbm_bytes=parse_bytes("--hbm", hbm),
            dram_bytes=parse_bytes("--dram", dram),
            nvme_bytes=parse_bytes("--nvme", nvme),
        ),
        policies=list(dict.fromkeys(policies)) or DEFAULT_POLICIES,
        seeds=seeds,
        budget=NO_BUDGET if write_budget is None else Budget.parse(write_budget),
    )
    if out is not None:
        out = _checked(out)
    document = answer(question, command, progress)
    if out is not None:
        _write_page(out, document)
    return document


def _checked(out: Path) -> Path:
    """Where the page goes; of a link, what it leads to."""
    target = out.resolve()
    if not target.parent.is_dir():
        raise ValueError(f"--out is {out}, and {target.parent} is no directory")
    if target.exists() and not target.is_file():
        raise ValueError(f"--out is {out}, must be a file or not be there yet")
    if not os.access(target.parent, os.W_OK):
        raise ValueError(f"--out is {out}, and nothing can be written to {target.parent}")
    return target


def _field(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--device is {text!r}, must be field=value")
    return name, value


def _write_page(path: Path, document: Document) -> None:
    """Whole or not at all: a page that was there before stays until the new one is complete."""
    from .page import render

    page = render(document)
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=f".{path.name}.", encoding="utf-8", delete=False
    ) as file:
        try:
            file.write(page)
            file.close()
            os.chmod(file.name, 0o644)  # a page is made to be passed on
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
