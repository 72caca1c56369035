"""The rivals of one round: each walks through all chunks and times every request itself.

A request asks for `depth` consecutive chunks of one chain. It ends when the engine's thread knows
that they are in DRAM, verified (NVMe hit), in pages (DRAM hit), or not here (miss).

Every NVMe hit has a raw read of as many chunks beside it, now before it and now after, into the
same slots: disks with a budget of bursts change speed within a round, and how a slot's memory is
laid out changes it by a factor. Both must find the same.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ..admission.base import Tier
from ..kernels import PagedKV, scatter
from ..tiers.base import Load
from ..tiers.store import TieredStore
from .engine_thread import BUSY_ENGINES, ENGINES, Step, run_alone, run_until_ready
from .hit_field import PAGE_TOKENS, Field
from .raw_io import PageLoop, RawReader

ALONE_S = 0.05


class What(NamedTuple):
    """What a rival measures; backend and engine are empty where they make no difference."""

    name: str
    backend: str = ""
    engine: str = ""


RAW, MEMCPY, BY_PAGE = What("raw preadv"), What("memcpy"), What("memcpy by page")
DRAM, NVME, MISS, ALONE = "DRAM hit", "NVMe hit", "miss", "engine alone"


@dataclass(frozen=True, slots=True)
class Samples:
    """One rival in one round. moved_bytes: by all requests together; steps: of the engine.

    raw_s: seconds of the raw reads beside the requests, one each; empty where there are none.
    """

    latencies_s: list[float]
    moved_bytes: int = 0
    steps: int = 0
    raw_s: list[float] = field(default_factory=list[float])

    @property
    def bytes_per_s(self) -> float:
        return self.moved_bytes / sum(self.latencies_s)

    @property
    def steps_per_s(self) -> float:
        return self.steps / sum(self.latencies_s)


Rival = Callable[[], Samples]


@contextmanager
def open_rivals(at: Field, depth: int, page_loop: Path | None) -> Iterator[dict[What, Rival]]:
    """Every rival at `depth`. page_loop: of build_page_loop(); without it BY_PAGE is left out."""
    rivals: dict[What, Rival] = {MEMCPY: partial(_memcpy, at, at.dram_addresses(), depth)}
    if page_loop is not None:
        rivals[BY_PAGE] = partial(_by_page, at, at.dram_addresses(), page_loop, depth)
    kv = PagedKV.of_slots(at.pool.pages)
    with ExitStack() as undo:
        for name, store in at.stores.items():
            slots = at.read_slots(store, depth)
            reader = undo.enter_context(RawReader(at.files, slots, at.direct))
            rivals[What(DRAM, name)] = partial(_dram_hits, at, kv, store, depth)
            rivals[What(MISS, name)] = partial(_misses, at, store, depth)
            for engine, step in ENGINES.items():
                rivals[What(NVME, name, engine)] = partial(_nvme_hits, at, store, reader, step)
                if engine in BUSY_ENGINES:
                    rivals[What(ALONE, name, engine)] = partial(_alone, store, step)
        yield rivals


def _nvme_hits(at: Field, store: TieredStore, reader: RawReader, step: Step) -> Samples:
    latencies_s, raw_s, steps = list[float](), list[float](), 0
    starts = _starts(at, reader.depth)
    for turn, start in enumerate(starts):
        # Half the chain away: neither finds what the other has just read in some cache below.
        raw_start = starts[(turn + len(starts) // 2) % len(starts)]
        if turn % 2:
            raw_s.append(reader.read(raw_start))
        latency_s, more_steps = _nvme_hit(at, store, start, reader.depth, step)
        latencies_s.append(latency_s)
        steps += more_steps
        if not turn % 2:
            raw_s.append(reader.read(raw_start))
    return Samples(latencies_s, _moved(at, reader.depth), steps, raw_s)


def _nvme_hit(
    at: Field, store: TieredStore, start: int, depth: int, step: Step
) -> tuple[float, int]:
    """(seconds until the engine knows that the load is READY, its steps meanwhile)"""
    chain = at.on_nvme[: start + depth]
    start_s = time.perf_counter()
    load = store.prepare_load(chain, start)
    steps = run_until_ready(store, load, step)
    latency_s = time.perf_counter() - start_s
    _require_whole(load, depth, Tier.NVME)
    store.complete_load(load)
    return latency_s, steps


def _dram_hits(at: Field, kv: PagedKV, store: TieredStore, depth: int) -> Samples:
    latencies_s: list[float] = []
    in_page = np.arange(PAGE_TOKENS)
    for start in _starts(at, depth):
        chain = at.in_dram[: start + depth]
        numbers = at.page_numbers[start : start + depth]
        slots = (numbers[..., None] * PAGE_TOKENS + in_page).reshape(depth, -1)
        start_s = time.perf_counter()
        load = store.prepare_load(chain, start)
        for view, chunk_slots in zip(store.load_views(load), slots, strict=True):
            chunk = view.view(torch.uint8).view(1, -1)
            scatter(chunk, kv, chunk_slots, pages_per_chunk=len(chunk_slots))
        store.complete_load(load)
        latencies_s.append(time.perf_counter() - start_s)
        _require_whole(load, depth, Tier.DRAM)
    return Samples(latencies_s, _moved(at, depth))


def _misses(at: Field, store: TieredStore, depth: int) -> Samples:
    latencies_s: list[float] = []
    chain = at.absent[:depth]
    for _ in _starts(at, depth):
        start_s = time.perf_counter()
        found = store.lookup(chain)
        store.complete_load(store.prepare_load(chain))
        latencies_s.append(time.perf_counter() - start_s)
        assert found.num_chunks == 0
    return Samples(latencies_s)


def _memcpy(at: Field, sources: list[int], depth: int) -> Samples:
    latencies_s: list[float] = []
    target = at.pool.pages.data_ptr()
    for start in _starts(at, depth):
        start_s = time.perf_counter()
        for index in range(start, start + depth):
            ctypes.memmove(target + index * at.chunk_bytes, sources[index], at.chunk_bytes)
        latencies_s.append(time.perf_counter() - start_s)
    return Samples(latencies_s, _moved(at, depth))


def _by_page(at: Field, sources: list[int], library: Path, depth: int) -> Samples:
    latencies_s: list[float] = []
    layout, target = at.chunks.layout, at.pool.pages.data_ptr()
    plane_bytes = at.pool.pages.stride(1) * layout.itemsize
    page_bytes = plane_bytes // at.pool.num_tokens * PAGE_TOKENS
    loop = PageLoop(library, layout.num_layers * layout.kv_factor, page_bytes, plane_bytes)
    for start in _starts(at, depth):
        start_s = time.perf_counter()
        for index in range(start, start + depth):
            loop.copy(sources[index], target, at.page_numbers[index])
        latencies_s.append(time.perf_counter() - start_s)
    return Samples(latencies_s, _moved(at, depth))


def _alone(store: TieredStore, step: Step) -> Samples:
    steps, elapsed_s = run_alone(store, step, ALONE_S)
    return Samples([elapsed_s], steps=steps)


def _starts(at: Field, depth: int) -> range:
    """The first chunk of each request of a round."""
    return range(0, at.num_chunks - depth + 1, depth)


def _moved(at: Field, depth: int) -> int:
    return len(_starts(at, depth)) * depth * at.chunk_bytes


def _require_whole(load: Load, depth: int, tier: Tier) -> None:
    """What is cut short must not look fast."""
    if load.stop - load.start != depth or set(load.tiers) != {tier}:
        raise OSError(f"a load of {depth} chunks from {tier} was cut short: {load.why_not}")
