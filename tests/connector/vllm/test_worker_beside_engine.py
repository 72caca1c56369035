"""The worker on a device whose copies run late, in whatever order events allow, beside an engine
that keeps vLLM's promises and no others."""

from dataclasses import dataclass
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rootcellar.tiers import movers
from rootcellar.tiers.toy_device import ToyDevice

from .toy_pages import (
    NUM_BLOCKS,
    Cache,
    Case,
    Shape,
    Transfer,
    cases,
    check_round_trip,
    open_arena,
    worker_on,
)


@given(case=cases(), random=st.randoms(use_true_random=False), batched=st.booleans())
@settings(max_examples=200)
def test_what_was_stored_is_loaded_and_nothing_else_is_touched(
    case: Case, random: Random, batched: bool
) -> None:
    device = ToyDevice(random.randrange, can_batch=batched)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(movers, "BATCHED_FROM_BYTES", 1)
        check_round_trip(case, lambda layout: worker_on(device, layout), device.drain)


SHAPE = Shape(tensors=[(16, 24), (5, 5)], groups=[[(0, 16), (1, 5)]], blocks_per_chunk=2)
CHUNK_BYTES = SHAPE.rank_bytes
SLOTS = range(6)
blocks = st.integers(0, 8)  # so few that transfers and kernels meet


@dataclass
class _Running:
    transfer: Transfer
    expected: list[bytes]


class EngineBesideTransfers(RuleBasedStateMachine):
    """Nobody else writes a page, or a slot, of a job before it is told of, or waited for. Kernels
    write pages on the compute stream; `pages` is what they hold once all that was launched is done,
    in the order of the program. More stores are asked for than may be under way."""

    def __init__(self) -> None:
        super().__init__()
        self.random = Random(0)
        self.device = ToyDevice(self.random.randrange)
        self.cache = Cache(SHAPE, seed=0)
        self.arena = open_arena(1, SHAPE)
        self.worker = worker_on(self.device, self.cache.layout(), in_flight_bytes=1)
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

    @rule(seed=st.integers(0, 1 << 20))
    def choose_otherwise(self, seed: int) -> None:
        self.random.seed(seed)

    @rule(wanted=st.sets(blocks, min_size=1, max_size=4), seed=st.integers(0, 255))
    def launch_a_kernel_that_writes_pages(self, wanted: set[int], seed: int) -> None:
        written = sorted(wanted - self.busy_blocks)
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

    @rule(steps=st.integers(1, 12))
    def let_streams_run(self, steps: int) -> None:
        for _ in range(steps):
            self.device.step()

    @rule(data=st.data())
    def fence(self, data: st.DataObject) -> None:
        """The engine is about to use pages of these jobs again: it does so before it asks which
        have ended."""
        jobs = data.draw(st.sets(st.integers(0, self.next_job + 1)))
        self.worker.wait(jobs)
        for job in jobs & self.stores.keys():
            self._check_stored(self.stores[job])
        for job in jobs & self.loads.keys():
            self._check_loaded(self.loads[job])

    @rule()
    def step(self) -> None:
        num_blocked = self.device.num_blocked
        for result in self.worker.get_finished():
            assert result.success
            assert result.transfer_time is not None
            assert result.transfer_time > 0
            if result.job_id in self.stores:
                self._stored(self.stores.pop(result.job_id))
            else:
                self._check_loaded(self.loads.pop(result.job_id))
        assert self.device.num_blocked == num_blocked

    def _stored(self, job: _Running) -> None:
        self._check_stored(job)
        for slot, expected in zip(job.transfer.slots, job.expected, strict=True):
            first, second, third = expected[:16], expected[16:32], expected[32:]
            self.stored[slot] = [first, third[:5], second, third[5:]]

    def _check_stored(self, job: _Running) -> None:
        for slot, expected in zip(job.transfer.slots, job.expected, strict=True):
            assert bytes(self.arena.slot(slot)[:CHUNK_BYTES]) == expected

    def _check_loaded(self, job: _Running) -> None:
        actual = self.cache_pages()
        for _, ids in job.transfer.groups:
            assert [actual[block] for block in ids] == [self.pages[block] for block in ids]

    @invariant()
    def what_is_stored_stays(self) -> None:
        for slot, (a, b, c, d) in self.stored.items():
            assert bytes(self.arena.slot(slot)[:CHUNK_BYTES]) == a + c + b + d

    def teardown(self) -> None:
        self.worker.wait(set(range(self.next_job + 1)))
        self.step()
        assert not self.stores
        assert not self.loads
        self.worker.shutdown()
        self.device.drain()
        assert self.cache_pages() == self.pages
        self.arena.close()


EngineBesideTransfers.TestCase.settings = settings(max_examples=120, stateful_step_count=30)
test_transfers_beside_an_engine_see_pages_in_program_order = EngineBesideTransfers.TestCase
