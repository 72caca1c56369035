import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path as FilePath
from tempfile import TemporaryDirectory

import pytest

from rootcellar.admission.lru import LruOrder
from rootcellar.tiers.arena import SharedArena
from rootcellar.tiers.dram import ChunkState, DramChunk, DramTier
from rootcellar.tiers.errors import TierError
from rootcellar.tiers.events import EventLog
from rootcellar.tiers.flusher import Flusher
from rootcellar.tiers.history import WhyNot
from rootcellar.tiers.io.base import Codec, Status
from rootcellar.tiers.io.threads import ThreadBackend
from rootcellar.tiers.metrics import Metrics
from rootcellar.tiers.nvme import NvmeTier, Planned, ReadDone
from rootcellar.tiers.recover import open_directory
from rootcellar.tiers.testing import TierContract, TierHarness
from rootcellar.tiers.toy import (
    CHUNK_BYTES,
    FILE_BYTES,
    LAYOUT,
    NAMESPACE,
    Path,
    bytes_on_disk,
    chunk_files,
    content_of,
    keys_of,
)

NUM_SLOTS = 16


class NvmeHarness(TierHarness):
    """The NVMe tier with real files; DRAM is a scratch pad that keeps nothing."""

    chunk_bytes = CHUNK_BYTES

    def __init__(self, num_chunks: int) -> None:
        self.folder = TemporaryDirectory()
        self.root = FilePath(self.folder.name) / "store"
        self.recovered = open_directory(self.root)
        self.arena = SharedArena(CHUNK_BYTES, NUM_SLOTS)
        self.why_not = WhyNot()
        self.dram = DramTier(self.arena, LruOrder(), self.why_not, Metrics(), EventLog())
        self.may_verify, self.may_rename = threading.Event(), threading.Event()
        self.may_verify.set()
        self.may_rename.set()
        self.io = ThreadBackend(self.root, self.arena, lanes=8, itemsize=4, pause=self._pause)
        self.tier = NvmeTier(
            self.root,
            self.recovered,
            self.io,
            self.dram,
            self.why_not,
            EventLog(),
            budget_bytes=num_chunks * FILE_BYTES,
            namespace=NAMESPACE.digest,
            codec=Codec.RAW,
            order=LruOrder(),
        )
        self.flusher = Flusher(self.dram, self.tier, LAYOUT, self.why_not, depth=2)

    def _pause(self, point: str) -> None:
        if point == "verify":
            self.may_verify.wait()
        if point == "rename":
            self.may_rename.wait()

    def offer(self, path: Path) -> None:
        self.tier.touch(keys_of(path), self.held(path), hits=0)
        for index in range(self.held(path), len(path)):
            chunk = self.reserve(path[: index + 1], ChunkState.WRITING)
            self.arena.slot(chunk.slot)[:] = content_of(path[: index + 1], CHUNK_BYTES)
            self.dram.settle(chunk, ChunkState.UNBACKED)
            self.flusher.add(chunk)
            self.settle_writes()
            self.dram.detach(chunk)
            self.tier.touch(keys_of(path), index + 1, hits=0)

    def reserve(self, path: Path, state: ChunkState) -> DramChunk:
        keys = keys_of(path)
        chunk = self.dram.reserve(keys[-1], keys[-2] if len(keys) > 1 else None, 8, state)
        assert chunk is not None
        return chunk

    def settle_writes(self) -> None:
        self.flusher.run()
        self.tier.submit()
        while self.flusher.pending:
            self.io.wait(1.0)
            for event in self.tier.poll():
                assert not isinstance(event, ReadDone)
                self.flusher.apply(event)
            self.flusher.run()
            self.tier.submit()

    def held(self, path: Path) -> int:
        keys = keys_of(path)
        return next((i for i, key in enumerate(keys) if not self.tier.holds(key)), len(keys))

    def read(self, path: Path) -> list[bytes]:
        chunks = self.start_reads(path)
        done = self.finish_reads(len(chunks))
        contents = [bytes(self.arena.slot(chunk.slot)) for chunk in chunks]
        for chunk in chunks:
            self.dram.settle(chunk, ChunkState.CLEAN)
            self.dram.detach(chunk)
        good = [done[chunk.slot] is Status.OK for chunk in chunks]
        return contents[: good.index(False)] if False in good else contents

    def start_reads(self, path: Path) -> list[DramChunk]:
        held = self.held(path)
        self.tier.touch(keys_of(path), held, hits=1)
        chunks = [self.reserve(path[: i + 1], ChunkState.READING) for i in range(held)]
        for chunk in chunks:
            self.arena.slot(chunk.slot)[:] = bytes(CHUNK_BYTES)
            assert self.tier.plan_read(chunk.key, chunk.slot)
        self.tier.submit()
        return chunks

    def finish_reads(self, number: int) -> dict[int, Status]:
        done: dict[int, Status] = {}
        while len(done) < number:
            self.io.wait(1.0)
            for event in self.tier.poll():
                assert isinstance(event, ReadDone)
                done[event.slot] = event.status
        return done

    @contextmanager
    def pinned(self, path: Path) -> Iterator[int]:
        """A chunk on disk is pinned by a read that is under way."""
        self.may_verify.clear()
        chunks = self.start_reads(path)
        yield len(chunks)
        self.may_verify.set()
        self.finish_reads(len(chunks))
        for chunk in chunks:
            self.dram.settle(chunk, ChunkState.CLEAN)
            self.dram.detach(chunk)

    def num_held(self) -> int:
        return len(self.tier)

    def check_integrity(self) -> None:
        self.tier.check_integrity()
        assert self.tier.used_bytes == bytes_on_disk(self.root)

    def close(self) -> None:
        self.may_verify.set()
        self.may_rename.set()
        self.tier.close()
        self.arena.close()
        self.recovered.lock.close()
        self.folder.cleanup()


class TestNvmeTier(TierContract):
    def make_tier(self, num_chunks: int) -> TierHarness:
        return NvmeHarness(num_chunks)


@pytest.fixture
def nvme() -> Iterator[NvmeHarness]:
    harness = NvmeHarness(4)
    yield harness
    harness.close()


def test_a_full_tier_overwrites_the_victims_file(nvme: NvmeHarness) -> None:
    nvme.offer((1, 2, 3, 4))
    inodes = {os.stat(path).st_ino for path in chunk_files(nvme.root)}
    nvme.offer((5, 6, 7))
    assert {os.stat(path).st_ino for path in chunk_files(nvme.root)} == inodes
    nvme.check_integrity()


def test_a_chunk_from_which_dram_hangs_is_not_evicted(nvme: NvmeHarness) -> None:
    nvme.offer((1,))
    child = nvme.reserve((1, 2), ChunkState.WRITING)
    nvme.dram.settle(child, ChunkState.UNBACKED)
    nvme.offer((5, 6, 7, 8))
    assert nvme.held((1,)) == 1
    nvme.dram.detach(child)
    nvme.offer((9, 9, 9, 9))
    assert nvme.held((1,)) == 0


def test_a_file_is_not_written_while_its_predecessor_is_being_removed(nvme: NvmeHarness) -> None:
    nvme.offer((1,))
    nvme.tier.drop(keys_of((1,))[0], "for the test")
    chunk = nvme.reserve((1,), ChunkState.WRITING)
    nvme.dram.settle(chunk, ChunkState.UNBACKED)
    assert nvme.tier.plan_write(chunk, CHUNK_BYTES) is Planned.LATER
    nvme.flusher.add(chunk)
    nvme.settle_writes()
    assert nvme.held((1,)) == 1
    nvme.check_integrity()


def test_a_chunk_dropped_while_it_is_written_leaves_no_file(nvme: NvmeHarness) -> None:
    chunk = nvme.reserve((1,), ChunkState.WRITING)
    nvme.dram.settle(chunk, ChunkState.UNBACKED)
    nvme.may_rename.clear()
    nvme.flusher.add(chunk)
    nvme.flusher.run()
    nvme.tier.submit()
    nvme.tier.drop(chunk.key, "for the test")
    nvme.may_rename.set()
    nvme.settle_writes()
    while nvme.tier.jobs_in_flight:
        nvme.io.wait(1.0)
        nvme.tier.poll()
    assert chunk_files(nvme.root) == []
    assert chunk.state is ChunkState.UNBACKED
    nvme.check_integrity()


def test_what_hangs_from_a_dropped_chunk_goes_with_it(nvme: NvmeHarness) -> None:
    nvme.offer((1, 2, 3))
    nvme.offer((1, 4))
    nvme.tier.drop(keys_of((1, 2))[1], "for the test")
    nvme.tier.submit()
    assert (nvme.held((1, 2, 3)), nvme.held((1, 4)), nvme.num_held()) == (1, 2, 2)
    assert nvme.why_not.reason(keys_of((1, 2, 3))[2]) == "for the test"


def test_a_long_chain_is_dropped_in_one_job(nvme: NvmeHarness) -> None:
    nvme.offer((1, 2, 3, 4))
    nvme.tier.drop(keys_of((1,))[0], "for the test")
    assert nvme.tier.jobs_in_flight == 1
    nvme.tier.submit()
    while nvme.tier.jobs_in_flight:
        nvme.io.wait(1.0)
        nvme.tier.poll()
    nvme.check_integrity()


def test_a_disk_that_refuses_writes_makes_refusals_not_errors(nvme: NvmeHarness) -> None:
    nvme.offer((1,))
    for folder in (nvme.root / "chunks").iterdir():
        os.rename(folder, nvme.root / "elsewhere")
        folder.write_bytes(b"")  # no file can come into place below it
    nvme.offer((2,))
    nvme.offer((1, 2))
    assert nvme.held((2,)) == 0
    assert nvme.read((1,)) == []
    assert nvme.num_held() == 0
    nvme.tier.check_integrity()


def test_invalidation_that_the_disk_cannot_remember_is_loud(nvme: NvmeHarness) -> None:
    nvme.offer((1, 2))
    os.rename(nvme.root / "dropped", nvme.root / "elsewhere")
    with pytest.raises(TierError, match="delete it before the store is opened again"):
        nvme.tier.invalidate(LruOrder(), NAMESPACE.digest)
    assert nvme.held((1, 2)) == 0
    assert nvme.tier.used_bytes == bytes_on_disk(nvme.root)
