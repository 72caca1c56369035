"""Two sections: how fast kernels move bytes, next to a device copy of the same bytes.

copies   gather and scatter of every layout, pages in no order (transformers' tokens in a row)
codes    the same that quantises, and checksums of the chunks

Rivals of one layout take turns. Timed on the device, several calls in a row; what one call takes
on the host, where numbers are packed and uploaded, is a column of its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from ..kernels import gather, scatter
from ..kernels.fp8 import fp8_chunk_bytes, gather_fp8, scatter_fp8
from ..kernels.xxh3 import xxh3_128
from .device_budget import Part
from .device_clock import Work, device_s, launch_s
from .device_pages import NAMES, EnginePages, Pages, engine_pages, noise, scattered
from .device_section import Bound, Findings, Row, Site, Target, compared, quotients
from .timing import interleave

COPY_TARGET = 0.80

_YARDSTICK = "device copy"
_REPEATS = 8
_POOL = 2  # times as many pages as are moved at once


def copies(site: Site, part: Part) -> Findings:
    races = [_Race(name) for name in NAMES]
    for number in part.rounds(site.scale.most_rounds):
        for race in races:
            ground = _Ground.of(site, race.layout)
            race.run(site, number, ground.num_bytes, _copies_of(ground))
    rows = [row for race in races for row in race.rows()]
    return Findings(rows, [_slowest(rows, kernel) for kernel in ("gather", "scatter")])


def codes(site: Site, part: Part) -> Findings:
    race = _Race("blocks")
    for number in part.rounds(site.scale.most_rounds):
        ground = _Ground.of(site, race.layout)
        race.run(site, number, ground.num_bytes, _codes_of(ground))
    return Findings(race.rows())


@dataclass(frozen=True, slots=True, eq=False)
class _Ground:
    """An engine's pages, those of them that are moved, and memory for as many bytes, twice."""

    engine: EnginePages
    pages: Pages
    chunks: torch.Tensor
    other: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.chunks.nbytes

    @classmethod
    def of(cls, site: Site, layout: str) -> _Ground:
        scale = site.scale
        engine = engine_pages(layout, scale.num_planes, _POOL * scale.num_chunks, site.generator())
        num_pages = scale.num_chunks * engine.pages_per_chunk
        pages = scattered(num_pages, engine.kv, site.seed)
        if layout == "heads":
            pages = np.arange(num_pages)  # a cache holds the tokens of one sequence
        num_bytes = engine.kv.chunk_bytes(num_pages)
        chunks = noise(num_bytes, site.generator()).view(scale.num_chunks, -1)
        return cls(engine, pages, chunks, torch.zeros_like(chunks))


@dataclass(slots=True)
class _Race:
    """Times of all rivals of one layout, round by round."""

    layout: str
    num_bytes: int = 0
    taken: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    launched: dict[str, list[float]] = field(default_factory=dict[str, list[float]])

    def run(self, site: Site, number: int, num_bytes: int, rivals: Mapping[str, Work]) -> None:
        self.num_bytes = num_bytes
        for name, work in rivals.items():
            work()  # compiles, and touches all memory
            self.launched.setdefault(name, []).append(launch_s(site.device, work))
        timed = {
            name: partial(device_s, site.device, work, _REPEATS) for name, work in rivals.items()
        }
        for name, samples in interleave(timed, 1, site.seed + number).items():
            self.taken.setdefault(name, []).extend(samples)

    def rows(self) -> list[Row]:
        return [self._row(name) for name in self.taken]

    def _row(self, kernel: str) -> Row:
        taken = self.taken[kernel]
        return {
            "layout": self.layout,
            "kernel": kernel,
            "size_bytes": self.num_bytes,
            "gb_per_s": self.num_bytes / statistics.median(taken) / 1e9,
            **compared("to_copy", quotients(taken, self.taken[_YARDSTICK])),
            "launch_us": statistics.median(self.launched[kernel]) * 1e6,
        }


def _copies_of(ground: _Ground) -> dict[str, Work]:
    kv, pages, chunks = ground.engine.kv, ground.pages, ground.chunks
    per_chunk = ground.engine.pages_per_chunk
    return {
        _YARDSTICK: partial(ground.other.copy_, chunks),
        "gather": partial(gather, kv, pages, chunks, pages_per_chunk=per_chunk),
        "scatter": partial(scatter, chunks, kv, pages, pages_per_chunk=per_chunk),
    }


def _codes_of(ground: _Ground) -> dict[str, Work]:
    kv, pages, chunks = ground.engine.kv, ground.pages, ground.chunks
    per_chunk = ground.engine.pages_per_chunk
    shape = (len(chunks), fp8_chunk_bytes(kv, per_chunk))
    quantised = torch.zeros(shape, dtype=torch.uint8, device=chunks.device)
    return {
        _YARDSTICK: partial(ground.other.copy_, chunks),
        "gather_fp8": partial(gather_fp8, kv, pages, quantised, pages_per_chunk=per_chunk),
        "scatter_fp8": partial(scatter_fp8, quantised, kv, pages, pages_per_chunk=per_chunk),
        "xxh3": partial(xxh3_128, chunks),
    }


def _slowest(rows: Sequence[Row], kernel: str) -> Target:
    slowest = min((row for row in rows if row["kernel"] == kernel), key=lambda row: row["to_copy"])
    what = f"{kernel} to a device copy, slowest layout ({slowest['layout']})"
    return Target(what, slowest["to_copy"], Bound.AT_LEAST, COPY_TARGET)
