"""Section: gather and scatter, byte for byte against torch's indexing.

In every layout of an engine, and in the awkward cases: scattered pages, part of a chunk, some of
the planes, odd sizes at odd addresses, pages beyond what 32 bits count.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..kernels import PagedKV, gather, scatter
from .device_budget import Part
from .device_pages import NAMES, EnginePages, Moved, engine_pages, noise, scattered
from .device_section import Findings, Row, Site

_ODD_BYTES = 7
_FAR_PAGE_BYTES = 32 << 10


def measure(site: Site, part: Part) -> Findings:
    """Once: what is exact once is exact again."""
    found = Findings()
    for case, moved in _cases(site):
        found.rows += _check(case, moved)
    found.wrong = [f"{row['kernel']}: {row['case']}" for row in found.rows if not row["exact"]]
    return found


def _cases(site: Site) -> Iterator[tuple[str, Moved]]:
    """Made one after the other, as each takes memory."""
    for name in NAMES:
        yield from _of_engine(site, name)
    yield "odd sizes at odd addresses", _odd(site)
    yield "the end of a large memory", _far(site)


def _of_engine(site: Site, name: str) -> Iterator[tuple[str, Moved]]:
    """Two chunks, in memory for three, which each case has to itself."""
    num_planes = site.scale.num_planes
    engine = engine_pages(name, num_planes, 3, site.generator())
    per_chunk = engine.pages_per_chunk
    pages, places = scattered(2 * per_chunk, engine.kv, site.seed), np.arange(2 * per_chunk)
    yield name, Moved(engine, pages, places, range(num_planes))
    some = slice(per_chunk // 2, per_chunk + per_chunk // 4)
    engine = engine_pages(name, num_planes, 3, site.generator())
    yield f"{name}, parts of chunks", Moved(engine, pages[some], places[some], range(num_planes))
    backwards, half = places[::-1].copy(), range(num_planes // 2, num_planes)
    engine = engine_pages(name, num_planes, 3, site.generator())
    yield f"{name}, some planes", Moved(engine, pages, backwards, half)


def _odd(site: Site) -> Moved:
    """Five tokens of three heads a page, each plane a byte further off alignment than the last."""
    shape, num_pages, gap = (5, 3, _ODD_BYTES), 16, 1
    size = num_pages * 5 * 3 * _ODD_BYTES

    def view(memory: torch.Tensor) -> PagedKV:
        starts = range(1, 4 * (size + gap), size + gap)
        return PagedKV(tuple(memory[at : at + size].view(num_pages, *shape) for at in starts))

    engine = EnginePages("odd", noise(4 * (size + gap) + 1, site.generator()), view, 4)
    pages = scattered(10, engine.kv, site.seed)
    return Moved(engine, pages, np.arange(1, 11), range(4))


def _far(site: Site) -> Moved:
    """The last pages of memory that 32 bits do not count."""
    page = _FAR_PAGE_BYTES
    memory = torch.zeros(site.scale.far_bytes, dtype=torch.uint8, device=site.device)
    tail = memory[-64 * page :]
    tail.copy_(noise(len(tail), site.generator()))
    engine = EnginePages("far", memory, lambda m: PagedKV.of_rows([m.view(-1, page)]), 16)
    pages = np.arange(engine.kv.num_pages - 32, engine.kv.num_pages)[::-1].copy()
    return Moved(engine, pages, np.arange(32), range(1))


def _check(case: str, moved: Moved) -> list[Row]:
    """Gather into memory with a pattern, then scatter into memory that was wiped: whatever is
    written where it should not be shows."""
    engine, kv, rows, expected = moved.engine, moved.engine.kv, moved.empty_rows(), moved.gathered()
    how: dict[str, Any] = {
        "pages_per_chunk": engine.pages_per_chunk,
        "places": moved.places,
        "planes": moved.planes,
    }
    gather(kv, moved.pages, moved.chunks(rows), **how)
    exact = {"gather": torch.equal(rows, expected)}
    engine.memory.zero_()
    expected_memory = moved.scattered(expected)
    scatter(moved.chunks(expected), kv, moved.pages, **how)
    exact["scatter"] = torch.equal(engine.memory, expected_memory)
    num_bytes = kv.chunk_bytes(len(moved.pages), moved.planes)
    return [
        {"kernel": kernel, "case": case, "size_bytes": num_bytes, "exact": same}
        for kernel, same in exact.items()
    ]
