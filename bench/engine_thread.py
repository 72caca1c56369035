"""What the engine's thread does while the store reads for it: the interpreter lock is shared.

    idle       sleeps between two polls
    python     runs pure Python and never lets go of the lock by itself
    releasing  lets go of the lock in every step, as an engine that calls into torch does

Each polls between its steps, as a scheduler does. The engine has a core of its own: else the kernel
may wake the IO side on the engine's core, where it waits for a time slice, while others are idle.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..tiers.base import Load, LoadState
from ..tiers.store import TieredStore

Step = Callable[[], object]

NAP_S = 20e-6
PYTHON_LOOPS = 400
"""Of one step: about 20 microseconds, so that noticing a load late costs little."""
RELEASED_BYTES = 64 << 10
"""Hashed per step without the lock: about twice as long as the Python part."""

_released = bytes(RELEASED_BYTES)


def nap() -> None:
    time.sleep(NAP_S)


def pure_python() -> int:
    value = 1
    for _ in range(PYTHON_LOOPS):
        value = value * 31 + 7 & 0xFFFF
    return value


def releasing() -> bytes:
    pure_python()
    return hashlib.sha256(_released).digest()


ENGINES: dict[str, Step] = {"idle": nap, "python": pure_python, "releasing": releasing}
"""One step of work, by the name of the engine."""

BUSY_ENGINES = ("python", "releasing")
"""Engines with a speed of their own to lose."""


def run_until_ready(store: TieredStore, load: Load, step: Step) -> int:
    """Work and poll until the load is READY; returns how many steps were done meanwhile."""
    steps = 0
    store.poll()
    while load.state is LoadState.PENDING:
        step()
        steps += 1
        store.poll()
    return steps


def run_alone(store: TieredStore, step: Step, duration_s: float) -> tuple[int, float]:
    """The same work with nothing to wait for: (steps, seconds they took)."""
    steps, start_s = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - start_s) < duration_s:
        step()
        steps += 1
        store.poll()
    return steps, elapsed_s


def split_cores() -> tuple[set[int], set[int]]:
    """(the engine's core, those of the IO side); the same one twice where there is no other."""
    cores = os.sched_getaffinity(0)
    engine = {max(cores)}
    return engine, cores - engine or engine


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """Keep this thread, and the threads and processes it starts inside, on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
