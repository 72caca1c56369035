"""Transfers beside an engine, on a device whose streams run in any order that events allow."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import cast

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rootcellar.tiers.movers import ChunkCopy
from rootcellar.tiers.toy_device import ToyDevice, ToyEvent
from rootcellar.tiers.transfer import CopyJob, Transfer

from .toy_engine import (
    CHUNK_BYTES,
    LAYERS,
    PAGES,
    PER_CHUNK,
    ROW_BYTES,
    SLOTS,
    ToyEngine,
    expect,
    set_mover,
    small_limits,
)

MOVERS = ["in place", "staged", "batched"]
IN_FLIGHT_BYTES = 3 * CHUNK_BYTES

pages = st.lists(st.integers(3, 12), min_size=1, max_size=8, unique=True)
launches_left = st.none() | st.integers(0, 6)
seeds = st.integers(0, 1 << 16)


@pytest.fixture(autouse=True)
def _small_limits() -> Iterator[None]:
    with small_limits():
        yield


@dataclass(eq=False)
class Running:
    pages: set[int]
    slots: list[int]
    chunks: list[bytes]
    """Of a store: what the slots shall hold."""


class EngineBesideTransfers(RuleBasedStateMachine):
    """An engine that keeps its promises: nobody else writes a page or slot of a job before the job
    is done, nor reads what a load brings before compute waits for its layer. The upper half of the
    pages is worked on by a forward stream that the engine names."""

    @initialize(seed=seeds, mover=st.sampled_from([*MOVERS, "not pinned"]), rows=st.integers(1, 2))
    def start(self, seed: int, mover: str, rows: int) -> None:
        self.device = ToyDevice(Random(seed).randrange)
        set_mover(self.device, mover)
        if mover == "not pinned":
            self.device.can_batch, self.device.pinned = True, False
        self.forward = self.device.stream(urgent=False)
        self.engine = ToyEngine(self.device)
        self.staging_bytes = rows * ROW_BYTES
        self.transfer = self.new_transfer()
        self.chunks: dict[int, bytes] = {}
        self.stores: dict[CopyJob, Running] = {}
        self.loads: dict[CopyJob, Running] = {}
        self.launched_by_wait: set[object] = set()  # which keeps no bound: its caller blocks

    def new_transfer(self) -> Transfer:
        return Transfer(
            self.device, staging_bytes=self.staging_bytes, in_flight_bytes=IN_FLIGHT_BYTES
        )

    @rule(wanted=pages, seed=seeds)
    def launch_a_kernel_that_writes_pages(self, wanted: list[int], seed: int) -> None:
        held = _pages_of([*self.stores.values(), *self.loads.values()])
        self.write([page for page in wanted if page not in held], seed)

    @rule(wanted=pages)
    def launch_a_kernel_that_reads_pages(self, wanted: list[int]) -> None:
        self.read([page for page in wanted if page not in _pages_of(self.loads.values())])

    @rule(wanted=pages, left=launches_left, seed=st.none() | seeds)
    def store(self, wanted: list[int], left: int | None, seed: int | None) -> None:
        """Of pages that kernels have just written, where there is a seed."""
        if seed is not None:
            self.launch_a_kernel_that_writes_pages(wanted, seed)
        loading = _pages_of(self.loads.values())
        ids = [page for page in wanted if page not in loading]
        slots = self.free_slots()[: len(ids) // PER_CHUNK]
        groups = [ids[PER_CHUNK * n :][:PER_CHUNK] for n in range(len(slots))]
        for slot in slots:
            self.chunks.pop(slot, None)
        copies = [self.engine.copy(group, slot) for group, slot in zip(groups, slots, strict=True)]
        with self.never_blocks(), self.refusing(left):
            job = self.transfer.store(copies, self.after(ids))
        expected = [self.engine.chunk(group) for group in groups]
        self.stores[job] = Running({p for g in groups for p in g}, slots, expected)

    @rule(wanted=pages, left=launches_left, first=st.integers(0, 1), by_layer=st.booleans())
    def load(self, wanted: list[int], left: int | None, first: int, by_layer: bool) -> None:
        held = _pages_of([*self.stores.values(), *self.loads.values()])
        ids = [page for page in wanted if page not in held]
        slots = list(self.chunks)[: -(-(first + len(ids)) // PER_CHUNK)]
        ids = ids[: PER_CHUNK * len(slots) - first]
        copies, chunks, at = list[ChunkCopy](), list[tuple[list[int], bytes, int]](), 0
        for slot in slots if ids else []:
            start = 0 if copies else first
            part = ids[at : at + PER_CHUNK - start]
            copies.append(self.engine.copy(part, slot, start))
            chunks.append((part, self.chunks[slot], start))
            at += len(part)
        self.read(ids)
        blocked = self.device.num_blocked
        try:
            with self.refusing(left):
                job = self.transfer.load(copies, self.after(ids), by_layer=by_layer)
        except RuntimeError:
            self.write(ids, seed=0)  # they are the engine's again
            return
        assert self.device.num_blocked == blocked
        for part, chunk, start in chunks:
            self.engine.load_model(part, chunk, start)
        self.loads[job] = Running(set(ids), slots, [])

    @precondition(lambda self: self.loads)
    @rule(data=st.data(), layer=st.integers(0, LAYERS - 1))
    def attend_to_a_layer_that_is_loaded(self, data: st.DataObject, layer: int) -> None:
        job = data.draw(st.sampled_from(list(self.loads)))
        with self.never_blocks():
            job.wait_for_layer(layer)
        self.forward.wait(self.device.compute_event())
        self.read(sorted(self.loads[job].pages), slice(layer, layer + 1))

    @rule(left=launches_left)
    def poll(self, left: int | None) -> None:
        with self.never_blocks(), self.refusing(left):
            ended = self.transfer.poll()
        for job in ended:
            self.end(job)

    @rule(data=st.data())
    def wait(self, data: st.DataObject) -> None:
        jobs = [*self.stores, *self.loads]
        chosen = data.draw(st.lists(st.sampled_from(jobs), unique=True)) if jobs else []
        launched = [part for job in self.stores for part in job.launched]
        self.transfer.wait(chosen)
        by_wait = [part for job in self.stores for part in job.launched if part not in launched]
        self.launched_by_wait.update(by_wait)
        assert all(job.done for job in chosen)

    @rule(slot=st.integers(0, SLOTS - 1))
    def reuse_a_slot(self, slot: int) -> None:
        if slot in self.free_slots():
            self.chunks.pop(slot, None)
            self.engine.slots[slot] = 0xFF

    @rule(index=st.integers(0, 5), most=st.integers(1, 12))
    def let_one_stream_run(self, index: int, most: int) -> None:
        stream = self.device.streams[index]
        for _ in range(most):
            if stream.able:
                stream.step()

    @rule()
    def close(self) -> None:
        self.transfer.close()
        self.transfer.close()
        for job in self.transfer.poll():
            self.end(job)
        assert not self.stores
        assert not self.loads
        assert not any(stream.queue for stream in self.device.streams[2:])
        del self.device.streams[2:]
        self.transfer = self.new_transfer()

    @invariant()
    def stored_chunks_stay(self) -> None:
        for slot, chunk in self.chunks.items():
            expect(self.engine.slot(slot), chunk, "slots")

    @invariant()
    def stores_in_flight_are_bounded(self) -> None:
        parts = [part for job in self.stores for part in job.launched]
        sizes = [
            part.num_bytes
            for part in parts
            if part not in self.launched_by_wait and cast(ToyEvent, part.end).at_ms is None
        ]
        assert sum(sizes) < IN_FLIGHT_BYTES + 2 * CHUNK_BYTES

    def teardown(self) -> None:
        self.close()
        self.device.drain()
        expect(self.engine.pages.tobytes(), self.engine.model.tobytes(), "pages")

    def write(self, ids: Sequence[int], seed: int) -> None:
        compute, forward = _by_stream(ids)
        self.engine.write(compute, seed)
        self.engine.write(forward, seed + 1, self.forward)

    def read(self, ids: Sequence[int], layers: slice = slice(None)) -> None:
        compute, forward = _by_stream(ids)
        self.engine.read(compute, layers=layers)
        self.engine.read(forward, self.forward, layers)

    def after(self, ids: Sequence[int]) -> list[ToyEvent]:
        """What the engine names: events of the forward stream, where that has to do with it."""
        return [self.forward.record()] if _by_stream(ids)[1] else []

    def end(self, job: CopyJob) -> None:
        """What poll() told of. Of the pages, a kernel sees whether they are right."""
        assert job.done
        if job in self.loads:
            assert job.error is None
            assert job.taken_s >= 0
            self.read(sorted(self.loads.pop(job).pages))
            return
        running = self.stores.pop(job)
        if job.error is None:
            assert job.num_bytes == len(running.slots) * CHUNK_BYTES
            self.chunks.update(zip(running.slots, running.chunks, strict=True))
            for slot in running.slots:
                expect(self.engine.slot(slot), self.chunks[slot], "slots")

    def free_slots(self) -> list[int]:
        running = [*self.stores.values(), *self.loads.values()]
        return [n for n in range(SLOTS) if not any(n in job.slots for job in running)]

    @contextmanager
    def never_blocks(self) -> Iterator[None]:
        before = self.device.num_blocked
        yield
        assert self.device.num_blocked == before

    @contextmanager
    def refusing(self, launches_left: int | None) -> Iterator[None]:
        self.device.launches_left = launches_left
        try:
            yield
        finally:
            self.device.launches_left = None


def _by_stream(ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """Those of compute, and those of the forward stream."""
    half = PAGES // 2
    return [page for page in ids if page < half], [page for page in ids if page >= half]


def _pages_of(running: Iterable[Running]) -> set[int]:
    return {page for job in running for page in job.pages}


EngineBesideTransfers.TestCase.settings = settings(max_examples=150, stateful_step_count=30)
test_transfers_beside_an_engine_see_pages_in_program_order = EngineBesideTransfers.TestCase
