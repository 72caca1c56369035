"""The GPU worker on a device in main memory, whose streams run in whatever order events allow."""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rootcellar.connector.vllm import cuda_worker
from rootcellar.connector.vllm.cuda_worker import CudaWorker
from rootcellar.connector.vllm.pages import PageLayout
from rootcellar.connector.vllm.worker import make_worker

from .toy_pages import NUM_BLOCKS, Cache, Case, Shape, Transfer, cases, check_round_trip, open_arena


@dataclass
class FakeEvent:
    device: "FakeDevice"
    done: bool = False
    at_ms: float = 0.0

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        while not self.done:
            assert self.device.step()

    def elapsed_time(self, end: "FakeEvent", /) -> float:
        assert self.done
        assert end.done
        return end.at_ms - self.at_ms


@dataclass
class FakeStream:
    """A queue of work, of events to wait for and of events to be past."""

    device: "FakeDevice"
    urgent: bool | None
    queue: deque[Callable[[], None] | FakeEvent | tuple[FakeEvent]] = field(
        default_factory=deque[Callable[[], None] | FakeEvent | tuple[FakeEvent]]
    )

    def run(self, work: Callable[[], None]) -> None:
        self.queue.append(work)

    def wait(self, event: Any) -> None:
        self.queue.append((event,))

    def record(self) -> FakeEvent:
        event = FakeEvent(self.device)
        self.queue.append(event)
        return event

    @property
    def stuck(self) -> bool:
        """Nothing to do, or waiting."""
        head = self.queue[0] if self.queue else None
        return head is None or (isinstance(head, tuple) and not head[0].done)

    def step(self) -> None:
        head = self.queue.popleft()
        if isinstance(head, FakeEvent):
            self.device.now_ms += 1
            head.done, head.at_ms = True, self.device.now_ms
        elif not isinstance(head, tuple):
            head()


class FakeDevice:
    def __init__(self, random: Random) -> None:
        self.random = random
        self.now_ms = 0.0
        self.compute = FakeStream(self, urgent=None)
        self.streams = [self.compute]
        self.pinned: dict[int, int] = {}
        self.refuse_from = 1 << 30

    def stream(self, *, urgent: bool) -> FakeStream:
        self.streams.append(FakeStream(self, urgent))
        return self.streams[-1]

    def compute_event(self) -> FakeEvent:
        return self.compute.record()

    def indices(self, blocks: torch.Tensor) -> torch.Tensor:
        return blocks.clone()

    def pin(self, address: int, size_bytes: int) -> int:
        if len(self.pinned) >= self.refuse_from:
            return 2
        self.pinned[address] = size_bytes
        return 0

    def unpin(self, address: int) -> None:
        del self.pinned[address]

    def step(self) -> bool:
        """One piece of work of any stream; False when there is none."""
        able = [stream for stream in self.streams if not stream.stuck]
        if able:
            self.random.choice(able).step()
        return bool(able)

    def drain(self) -> None:
        while self.step():
            pass
        assert not any(stream.queue for stream in self.streams)


@given(case=cases(), random=st.randoms(use_true_random=False))
@settings(max_examples=200)
def test_what_was_stored_is_loaded_and_nothing_else_is_touched(case: Case, random: Random) -> None:
    device = FakeDevice(random)
    check_round_trip(case, lambda layout: CudaWorker(layout, device), device.drain)
    assert device.pinned == {}


SHAPE = Shape(tensors=[(16, 24), (5, 5)], groups=[[(0, 16), (1, 5)]], blocks_per_chunk=2)
SLOTS = range(6)
blocks = st.integers(0, 8)  # so few that transfers and kernels meet


@dataclass
class _Running:
    transfer: Transfer
    expected: list[bytes]


class EngineBesideTransfers(RuleBasedStateMachine):
    """An engine that keeps vLLM's promises: nobody else writes a page, or a slot, of a transfer
    before it is finished. Kernels write pages on the compute stream; `pages` is what they hold once
    all that was launched is done, in the order of the program."""

    def __init__(self) -> None:
        super().__init__()
        self.device = FakeDevice(Random(0))
        self.cache = Cache(SHAPE, seed=0)
        self.arena = open_arena(1, SHAPE)
        self.worker = CudaWorker(self.cache.layout(), self.device)
        self.pages = self.cache_pages()
        self.stored: dict[int, list[bytes]] = {}
        self.stores: dict[int, _Running] = {}
        self.loads: dict[int, _Running] = {}
        self.next_job = 0

    def cache_pages(self) -> list[list[bytes]]:
        """[block][ref]: the bytes that are there now."""
        return [
            [
                self.cache.memory[tensor][self.cache.page_at(tensor, block) :][:size].tobytes()
                for tensor, size in SHAPE.groups[0]
            ]
            for block in range(NUM_BLOCKS)
        ]

    @property
    def busy_blocks(self) -> set[int]:
        running = [*self.stores.values(), *self.loads.values()]
        return {b for job in running for _, ids in job.transfer.groups for b in ids}

    @property
    def busy_slots(self) -> set[int]:
        running = [*self.stores.values(), *self.loads.values()]
        return {slot for job in running for slot in job.transfer.slots}

    def free(self, wanted: set[int]) -> list[int]:
        return sorted(wanted - self.busy_blocks)

    @rule(wanted=st.sets(blocks, min_size=1, max_size=4), seed=st.integers(0, 255))
    def launch_a_kernel_that_writes_pages(self, wanted: set[int], seed: int) -> None:
        written = self.free(wanted)
        for block in written:
            self.pages[block] = [bytes([seed]) * size for _, size in SHAPE.groups[0]]

        def kernel() -> None:
            for block in written:
                for tensor, size in SHAPE.groups[0]:
                    page = self.cache.page_at(tensor, block)
                    self.cache.memory[tensor][page : page + size] = seed

        self.device.compute.run(kernel)

    @rule(wanted=st.lists(blocks, min_size=2, max_size=6, unique=True), data=st.data())
    def store(self, wanted: list[int], data: st.DataObject) -> None:
        ids = [block for block in wanted if block not in self.busy_blocks]
        slots = [slot for slot in SLOTS if slot not in self.busy_slots][: len(ids) // 2]
        if not slots:
            return
        slots = data.draw(st.permutations(slots))
        ids = ids[: 2 * len(slots)]
        transfer = Transfer([(0, ids)], slots)
        for slot in slots:
            self.stored.pop(slot, None)
        expected = [self._chunk(ids[at : at + 2]) for at in range(0, len(ids), 2)]
        self.worker.submit_store(self._job(), transfer.pages, transfer.into(self.arena))
        self.stores[self.next_job] = _Running(transfer, expected)

    @precondition(lambda self: self.stored)
    @rule(wanted=st.lists(blocks, min_size=1, max_size=6, unique=True), first=st.integers(0, 1))
    def load(self, wanted: list[int], first: int) -> None:
        ids = [block for block in wanted if block not in self.busy_blocks]
        ids = ids[: 2 * len(self.stored) - first]
        if not ids:
            return
        slots = list(self.stored)[: -(-(first + len(ids)) // 2)]
        transfer = Transfer([(first, ids)], slots)
        for nth, block in enumerate(ids, first):
            chunk = self.stored[slots[nth // 2]]
            self.pages[block] = chunk[2 * (nth % 2) :][:2]
        self.worker.submit_load(self._job(), transfer.into(self.arena), transfer.pages)
        self.loads[self.next_job] = _Running(transfer, [])

    def _job(self) -> int:
        self.next_job += 1
        return self.next_job

    def _chunk(self, ids: list[int]) -> bytes:
        """As it lies in a slot: ref after ref."""
        return b"".join(self.pages[block][ref] for ref in range(2) for block in ids)

    @rule(choices=st.lists(st.integers(0, 2), max_size=12))
    def let_streams_run(self, choices: list[int]) -> None:
        for choice in choices:
            stream = self.device.streams[choice]
            if not stream.stuck:
                stream.step()

    @rule(data=st.data())
    def fence(self, data: st.DataObject) -> None:
        """The engine is about to use pages of these transfers again."""
        jobs = data.draw(st.sets(st.integers(0, self.next_job + 1)))
        self.worker.wait(jobs)
        self.poll()
        assert not jobs & (self.stores.keys() | self.loads.keys())

    @rule()
    def poll(self) -> None:
        for result in self.worker.get_finished():
            assert result.success
            assert result.transfer_time is not None
            assert result.transfer_time > 0
            if result.job_id in self.stores:
                self._stored(self.stores.pop(result.job_id))
            else:
                self._loaded(self.loads.pop(result.job_id))

    def _stored(self, job: _Running) -> None:
        for slot, expected in zip(job.transfer.slots, job.expected, strict=True):
            assert bytes(self.arena.slot(slot)[: len(expected)]) == expected
            first, second, third = expected[:16], expected[16:32], expected[32:]
            self.stored[slot] = [first, third[:5], second, third[5:]]

    def _loaded(self, job: _Running) -> None:
        actual = self.cache_pages()
        for _, ids in job.transfer.groups:
            assert [actual[block] for block in ids] == [self.pages[block] for block in ids]

    @invariant()
    def what_is_stored_stays(self) -> None:
        for slot, (a, b, c, d) in self.stored.items():
            assert bytes(self.arena.slot(slot)[:42]) == a + c + b + d

    def teardown(self) -> None:
        self.worker.shutdown()
        self.poll()
        assert not self.stores
        assert not self.loads
        self.device.drain()
        assert self.cache_pages() == self.pages
        self.arena.close()


EngineBesideTransfers.TestCase.settings = settings(max_examples=150, stateful_step_count=30)
test_transfers_beside_an_engine_see_pages_in_program_order = EngineBesideTransfers.TestCase


def _layout() -> PageLayout:
    return Cache(SHAPE, seed=0).layout()


CHUNK = Transfer([(0, [3, 1])], [2])


def test_stores_give_way_to_the_engine_and_loads_do_not() -> None:
    device = FakeDevice(Random(0))
    CudaWorker(_layout(), device)
    assert [stream.urgent for stream in device.streams[1:]] == [False, True]


@pytest.mark.parametrize("verb", ["store", "load"])
def test_a_transfer_waits_for_the_kernels_launched_before_it(verb: str) -> None:
    device, arena = FakeDevice(Random(0)), open_arena(1, SHAPE)
    cache = Cache(SHAPE, seed=0)
    worker = CudaWorker(cache.layout(), device)
    ran: list[bytes] = []
    device.compute.run(lambda: ran.append(bytes(arena.buffer) + cache.memory[0].tobytes()))
    before = bytes(arena.buffer) + cache.memory[0].tobytes()
    if verb == "store":
        worker.submit_store(1, CHUNK.pages, CHUNK.into(arena))
    else:
        worker.submit_load(1, CHUNK.into(arena), CHUNK.pages)
    for stream in device.streams[1:]:
        while not stream.stuck:
            stream.step()
    device.drain()
    assert ran == [before]
    assert bytes(arena.buffer) + cache.memory[0].tobytes() != before
    worker.shutdown()
    arena.close()


def test_nothing_waits_until_it_is_asked_to() -> None:
    device, arena = FakeDevice(Random(0)), open_arena(1, SHAPE)
    worker = CudaWorker(_layout(), device)
    worker.submit_store(1, CHUNK.pages, CHUNK.into(arena))
    worker.submit_load(2, CHUNK.into(arena), CHUNK.pages)
    assert worker.get_finished() == []
    worker.wait({1})
    assert 1 in [result.job_id for result in worker.get_finished()]
    worker.shutdown()
    arena.close()


@pytest.mark.parametrize("piece_slots", [0, 1, 2, 9, 100])
def test_the_arena_is_pinned_in_pieces_that_end_between_slots(
    monkeypatch: pytest.MonkeyPatch, piece_slots: int
) -> None:
    device, arena = FakeDevice(Random(0)), open_arena(1, SHAPE)
    monkeypatch.setattr(cuda_worker, "_PIECE_BYTES", piece_slots * arena.slot_bytes + 7)
    worker = CudaWorker(_layout(), device)
    worker.submit_store(1, CHUNK.pages, CHUNK.into(arena))
    _settle(worker)
    ends = [start + size for start, size in sorted(device.pinned.items())]
    assert sorted(device.pinned)[1:] == ends[:-1]
    assert sum(device.pinned.values()) == len(arena.buffer)
    assert all(size % arena.slot_bytes == 0 for size in device.pinned.values())
    assert len(device.pinned) == -(-9 // max(1, piece_slots))
    worker.shutdown()
    assert device.pinned == {}
    arena.close()


def test_what_cuda_refuses_to_pin_is_used_unpinned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device, arena = FakeDevice(Random(0)), open_arena(1, SHAPE)
    device.refuse_from = 2
    monkeypatch.setattr(cuda_worker, "_PIECE_BYTES", arena.slot_bytes)
    worker = CudaWorker(_layout(), device)
    with caplog.at_level(logging.WARNING):
        worker.submit_store(1, CHUNK.pages, CHUNK.into(arena))
        _settle(worker)
    assert f"not pinned from byte {2 * arena.slot_bytes} on: CUDA error 2" in caplog.text
    worker.wait({1})
    assert [result.success for result in worker.get_finished()] == [True]
    worker.shutdown()
    assert device.pinned == {}
    arena.close()


def _settle(worker: CudaWorker) -> None:
    assert worker._pinner is not None
    worker._pinner._thread.join(10)


def test_aligned_pages_move_as_words_and_others_as_bytes() -> None:
    worker = CudaWorker(_layout(), FakeDevice(Random(0)))
    aligned, odd = worker._gathers[0]
    assert [rows.dtype for rows in aligned] == [torch.int64] * 2
    assert [rows.dtype for rows in odd] == [torch.uint8] * 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpu_stores_and_loads() -> None:
    cache, arena = Cache(SHAPE, seed=0), open_arena(1, SHAPE)
    caches = cache.canonical()
    for tensor in caches.tensors:
        tensor.tensor = tensor.tensor.contiguous().cuda()
    before = [tensor.tensor.clone() for tensor in caches.tensors]
    worker = make_worker(
        caches, blocks_per_chunk=2, rank=0, rank_bytes=SHAPE.rank_bytes, replicated=False
    )
    worker.submit_store(1, CHUNK.pages, CHUNK.into(arena))
    worker.wait({1})
    for tensor, page, at, size in CHUNK.places(cache, arena.slot_bytes, 0):
        expected = cache.memory[tensor][page : page + size].tobytes()
        assert bytes(arena.buffer[at : at + size]) == expected
    for tensor in caches.tensors:
        tensor.tensor[[3, 1]] = 0
    worker.submit_load(2, CHUNK.into(arena), CHUNK.pages)
    worker.wait({2})
    assert [result.job_id for result in worker.get_finished()] == [1, 2]
    for tensor, kept in zip(caches.tensors, before, strict=True):
        assert torch.equal(tensor.tensor, kept)
    worker.shutdown()
    arena.close()
