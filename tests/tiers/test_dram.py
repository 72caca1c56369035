import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rootcellar.admission.lru import LruOrder
from rootcellar.tiers.arena import SharedArena
from rootcellar.tiers.dram import ChunkState, DramChunk, DramTier
from rootcellar.tiers.events import EventLog
from rootcellar.tiers.history import WhyNot
from rootcellar.tiers.metrics import Metrics
from rootcellar.tiers.testing import TierContract, TierHarness
from rootcellar.tiers.toy import Path, content_of, keys_of

SLOT_BYTES = 4096


class DramHarness(TierHarness):
    """The DRAM tier alone: the bytes are put into and read from the arena behind its back."""

    chunk_bytes = SLOT_BYTES

    def __init__(self, num_slots: int) -> None:
        self.arena = SharedArena(SLOT_BYTES, num_slots)
        assert self.arena.wait_touched(num_slots, 10.0)
        self.why_not = WhyNot()
        self.tier = DramTier(self.arena, LruOrder(), self.why_not, Metrics(), EventLog())

    def offer(self, path: Path) -> None:
        keys = keys_of(path)
        held = self.held(path)
        self.tier.touch(keys, held)
        with self.pinned(path):
            for index in range(held, len(keys)):
                parent = keys[index - 1] if index else None
                chunk = self.tier.reserve(keys[index], parent, 8, ChunkState.WRITING)
                if chunk is None:
                    break
                self.arena.slot(chunk.slot)[:] = content_of(path[: index + 1], SLOT_BYTES)
                self.tier.settle(chunk, ChunkState.CLEAN)
                self.tier.touch(keys, index + 1)
                self.tier.pin(chunk)
            for key in keys[held:]:
                added = self.tier.get(key)
                if added is not None:
                    self.tier.unpin(added)

    def held(self, path: Path) -> int:
        return len(self._run(path))

    def read(self, path: Path) -> list[bytes]:
        run = self._run(path)
        self.tier.touch(keys_of(path), len(run))
        return [bytes(self.arena.slot(chunk.slot)) for chunk in run]

    @contextmanager
    def pinned(self, path: Path) -> Iterator[int]:
        run = self._run(path)
        for chunk in run:
            self.tier.pin(chunk)
        yield len(run)
        for chunk in run:
            self.tier.unpin(chunk)

    def num_held(self) -> int:
        return len(self.tier)

    def check_integrity(self) -> None:
        self.tier.check_integrity()

    def close(self) -> None:
        self.arena.close()

    def _run(self, path: Path) -> list[DramChunk]:
        run: list[DramChunk] = []
        for key in keys_of(path):
            chunk = self.tier.get(key)
            if chunk is None or not chunk.readable:
                break
            run.append(chunk)
        return run


class TestDramTier(TierContract):
    def make_tier(self, num_chunks: int) -> TierHarness:
        return DramHarness(num_chunks)


@pytest.fixture
def dram() -> Iterator[DramTier]:
    harness = DramHarness(3)
    yield harness.tier
    harness.close()


def _reserve(
    dram: DramTier, path: Path, state: ChunkState = ChunkState.WRITING
) -> DramChunk | None:
    keys = keys_of(path)
    return dram.reserve(keys[-1], keys[-2] if len(keys) > 1 else None, 8, state)


def _added(dram: DramTier, path: Path, state: ChunkState) -> DramChunk:
    chunk = _reserve(dram, path)
    assert chunk is not None
    if state is not ChunkState.WRITING:
        dram.settle(chunk, state)
    return chunk


@pytest.mark.parametrize("state", [ChunkState.WRITING, ChunkState.DIRTY, ChunkState.FLUSHING])
def test_what_is_not_on_nvme_yet_is_not_evicted(dram: DramTier, state: ChunkState) -> None:
    chunks = [_added(dram, (n,), state) for n in range(3)]
    assert _reserve(dram, (9,)) is None
    dram.settle(chunks[1], ChunkState.CLEAN)
    assert _reserve(dram, (9,)) is not None
    assert dram.get(keys_of((1,))[0]) is None
    dram.check_integrity()


def test_a_detached_chunk_keeps_its_slot_until_its_readers_are_gone(dram: DramTier) -> None:
    chunk = _added(dram, (1,), ChunkState.CLEAN)
    dram.pin(chunk)
    dram.pin(chunk)
    dram.detach(chunk)
    assert dram.get(chunk.key) is None
    dram.unpin(chunk)
    assert len(dram) == 1
    dram.unpin(chunk)
    assert len(dram) == 0
    dram.check_integrity()


def test_a_staged_chunk_leaves_with_its_last_reader_unless_admitted(dram: DramTier) -> None:
    for path, admit in (((1,), False), ((2,), True)):
        chunk = _reserve(dram, path, ChunkState.READING)
        assert chunk is not None
        dram.pin(chunk)
        dram.settle(chunk, ChunkState.CLEAN)
        if admit:
            dram.admit(chunk)
        dram.unpin(chunk)
        assert (dram.get(chunk.key) is not None) == admit
        dram.check_integrity()


def test_forgetting_an_unbacked_chunk_is_remembered() -> None:
    harness = DramHarness(1)
    gone = _added(harness.tier, (1,), ChunkState.UNBACKED)
    assert _reserve(harness.tier, (2,)) is not None
    assert harness.why_not.reason(gone.key).startswith("evicted from dram")
    harness.close()


def test_chunks_anchor_the_parent_that_is_not_here(dram: DramTier) -> None:
    _added(dram, (1, 2), ChunkState.CLEAN)
    parent = keys_of((1,))[0]
    assert dram.anchors(parent)
    _added(dram, (1,), ChunkState.CLEAN)
    assert not dram.anchors(parent)


def test_clear_frees_all_but_what_is_in_use(dram: DramTier) -> None:
    chunks = [_added(dram, (n,), ChunkState.CLEAN) for n in range(3)]
    dram.pin(chunks[0])
    dram.clear(LruOrder())
    assert [dram.get(chunk.key) for chunk in chunks] == [None, None, None]
    assert len(dram) == 1
    dram.unpin(chunks[0])
    assert len(dram) == 0
    dram.check_integrity()


def test_random_pins_states_and_detaches_keep_every_slot_accounted_for() -> None:
    for seed in range(20):
        rng, harness = random.Random(seed), DramHarness(4)
        dram = harness.tier
        used: list[DramChunk] = []
        for _ in range(80):
            path = tuple(rng.randrange(2) for _ in range(rng.randint(1, 3)))
            action = rng.randrange(5)
            if action == 0 and dram.get(keys_of(path)[-1]) is None:
                chunk = _reserve(dram, path, rng.choice([ChunkState.WRITING, ChunkState.READING]))
                if chunk is not None:
                    dram.pin(chunk)
                    used.append(chunk)
            elif action == 1 and used:
                dram.settle(rng.choice(used), ChunkState.CLEAN)
            elif action == 2 and used:
                dram.unpin(used.pop(rng.randrange(len(used))))
            elif action == 3:
                dram.detach_below(keys_of(path)[0])
            elif action == 4:
                dram.touch(keys_of(path), len(path))
            dram.check_integrity()
        harness.close()
