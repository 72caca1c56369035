"""Section: the whole path between pages and slots, next to one plain copy of the same bytes.

store   pages -> slots, through a Transfer, from the call until a poll finds it done
load    the reverse
plain   one copy between one piece of device memory and one piece of pinned memory

For chunks of several sizes, pages of several sizes, and every way that a Transfer knows; each is
compared byte for byte before it is timed.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import product

import torch

from ..tiers import movers
from ..tiers.device import Device, device_of
from ..tiers.movers import Batched, ChunkCopy, InPlace, Staged, mover_for
from ..tiers.transfer import CopyJob, Transfer
from .device_budget import Part
from .device_clock import wall_s
from .device_pages import noise
from .device_section import Bound, Findings, Row, Site, Target, compared, quotients
from .device_slots import Form, slots
from .timing import interleave

CHUNK_BYTES = (1 << 20, 2 << 20, 8 << 20, 32 << 20)
PAGE_BYTES = (32 << 10, 256 << 10, 2 << 20)
TARGETS = {2 << 20: 0.85, 32 << 20: 0.95}
"""By chunk size, of the way that a Transfer chooses."""
STAGING_BYTES = 64 << 20

_PLAIN = "plain"


class Way(StrEnum):
    STAGED = "staged"
    BATCHED = "batched"
    IN_PLACE = "in place"


class Direction(StrEnum):
    STORE = "store"
    LOAD = "load"


def measure(site: Site, part: Part) -> Findings:
    with slots(site.device, site.scale.link_bytes) as in_slots:
        link = _Link(site, in_slots)
        try:
            return _measure(link, site, part)
        finally:
            link.close()  # before the slots go


def _measure(link: _Link, site: Site, part: Part) -> Findings:
    found = Findings(notes=[] if link.can_batch else ["no batched copies: the driver has none"])
    races = [
        _Race.on(link, form)
        for form in map(Form, *zip(*product(CHUNK_BYTES, PAGE_BYTES), strict=True))
        if form.page_bytes <= form.chunk_bytes
    ]
    found.wrong = [wrong for race in races for wrong in race.check()]
    for number in part.rounds(site.scale.most_rounds):
        for race in races:
            race.run(site.seed + number)
    found.rows = [row for race in races for row in race.rows()]
    found.targets = list(_targets(found.rows))
    return found


class _Link:
    """Pages on a device, slots in main memory, and the two roads between them."""

    def __init__(self, site: Site, in_slots: torch.Tensor) -> None:
        self.seed = site.seed
        self.slots = in_slots
        self.memory = noise(len(in_slots), site.generator())
        self.plain = torch.empty(len(in_slots), dtype=torch.uint8, pin_memory=site.on_gpu)
        self.device: Device = device_of([self.memory])
        self.can_batch = self.device.can_batch
        self._transfer = Transfer(self.device, staging_bytes=STAGING_BYTES)

    @property
    def ways(self) -> list[Way]:
        if self.device.in_place:
            return [Way.IN_PLACE]
        return [Way.STAGED, Way.BATCHED] if self.can_batch else [Way.STAGED]

    def plain_s(self, direction: Direction) -> float:
        store = direction is Direction.STORE
        target, source = (self.plain, self.memory) if store else (self.memory, self.plain)
        return wall_s(self.memory.device, lambda: target.copy_(source, non_blocking=True))

    def path_s(self, copies: list[ChunkCopy], way: Way, direction: Direction) -> float:
        with _only(way, self.device, copies):
            return wall_s(self.memory.device, lambda: self._run(copies, direction))

    def chosen(self, copies: list[ChunkCopy]) -> Way:
        return _way_of(self.device, copies)

    def close(self) -> None:
        self._transfer.close()

    def _run(self, copies: list[ChunkCopy], direction: Direction) -> None:
        store = direction is Direction.STORE
        job: CopyJob = self._transfer.store(copies) if store else self._transfer.load(copies)
        while job not in self._transfer.poll():
            pass
        if job.error is not None:
            raise job.error


@dataclass(slots=True)
class _Race:
    """Every way, both directions, and the plain copies in turns, for one form of chunks."""

    link: _Link
    form: Form
    copies: list[ChunkCopy]
    """Made once: what a copy has to find out about planes is found out by the first."""
    taken: dict[str, list[float]] = field(default_factory=dict[str, list[float]])

    @classmethod
    def on(cls, link: _Link, form: Form) -> _Race:
        return cls(link, form, form.copies(link.memory, link.slots, link.seed))

    def check(self) -> Iterator[str]:
        """What is not byte for byte as it should be. Leaves the pages as they were."""
        link, copies = self.link, self.copies
        before = link.memory.clone()
        expected = self.form.packed(before, len(copies), link.seed)
        for way in link.ways:
            link.slots.zero_()
            link.path_s(copies, way, Direction.STORE)
            if not torch.equal(link.slots.to(before.device), expected):
                yield f"{way} store of {self.form}"
            link.slots.copy_(expected)
            link.memory.zero_()
            link.path_s(copies, way, Direction.LOAD)
            if not torch.equal(link.memory, before):
                yield f"{way} load of {self.form}"
            link.memory.copy_(before)

    def run(self, seed: int) -> None:
        copies, runs = self.copies, dict[str, Callable[[], float]]()
        for direction in Direction:
            runs[f"{_PLAIN} {direction}"] = partial(self.link.plain_s, direction)
            for way in self.link.ways:
                runs[f"{way} {direction}"] = partial(self.link.path_s, copies, way, direction)
        for what, samples in interleave(runs, 1, seed).items():
            self.taken.setdefault(what, []).extend(samples)

    def rows(self) -> list[Row]:
        chosen = self.link.chosen(self.copies)
        return [
            {
                "chunk_bytes": self.form.chunk_bytes,
                "page_bytes": self.form.page_bytes,
                "direction": direction,
                "way": way,
                "chosen": way == chosen,
                **self._speed(f"{way} {direction}", f"{_PLAIN} {direction}"),
            }
            for direction, way in product(Direction, self.link.ways)
        ]

    def _speed(self, what: str, yardstick: str) -> Row:
        taken, plain, num_bytes = self.taken[what], self.taken[yardstick], len(self.link.slots)
        return {
            "gb_per_s": num_bytes / statistics.median(taken) / 1e9,
            "plain_gb_per_s": num_bytes / statistics.median(plain) / 1e9,
            **compared("to_plain", quotients(taken, plain)),
        }


@contextmanager
def _only(way: Way, device: Device, copies: list[ChunkCopy]) -> Iterator[None]:
    """Let transfers go no other way. RuntimeError if these copies would."""
    before = movers.BATCHED_FROM_BYTES
    movers.BATCHED_FROM_BYTES = 1 if way is Way.BATCHED else sys.maxsize
    try:
        if (taken := _way_of(device, copies)) is not way:
            raise RuntimeError(f"copies go {taken}, not {way}")
        yield
    finally:
        movers.BATCHED_FROM_BYTES = before


def _way_of(device: Device, copies: list[ChunkCopy]) -> Way:
    pinned = all(device.is_pinned(copy.slot) for copy in copies)
    mover = mover_for(device, copies[0].kv, pinned=pinned)
    return {InPlace: Way.IN_PLACE, Staged: Way.STAGED, Batched: Way.BATCHED}[type(mover)]


def _targets(rows: list[Row]) -> Iterator[Target]:
    for (chunk_bytes, limit), direction in product(TARGETS.items(), Direction):
        ratios = [
            row["to_plain"]
            for row in rows
            if row["chosen"] and (row["chunk_bytes"], row["direction"]) == (chunk_bytes, direction)
        ]
        what = f"{direction} of {chunk_bytes >> 20} MiB chunks to a plain copy, slowest page size"
        yield Target(what, min(ratios), Bound.AT_LEAST, limit)
