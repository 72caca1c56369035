"""Direct loads on a toy device, whose stream works late, with a toy reader, which does too."""

import gc
import random
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given

from rootcellar.kernels.paged import PagedKV
from rootcellar.tiers.device import CpuDevice
from rootcellar.tiers.gpu_direct import DirectLoads, DirectRead
from rootcellar.tiers.movers import ChunkCopy
from rootcellar.tiers.toy import (
    CHUNK_BYTES,
    CHUNK_TOKENS,
    LAYOUT,
    bytes_of,
    content_of,
    keys_of,
)
from rootcellar.tiers.toy_device import ToyDevice
from rootcellar.tiers.transfer import Transfer

from .test_direct_loading import CHAIN, KEYS, LendingMachine, fill, lending, open_store

NUM_ROWS = 3


class ToyReader:
    """Reads a file when told to, or when closed, in any order."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, torch.Tensor, Future[int]]] = []
        self.broken: Exception | None = None
        self.closed = False

    def read(self, path: str, target: torch.Tensor) -> Future[int]:
        future = Future[int]()
        self.asked.append((path, target, future))
        return future

    def answer(self, which: int = 0) -> None:
        path, target, future = self.asked.pop(which)
        try:
            if self.broken:
                raise self.broken
            content = np.fromfile(path, np.uint8)[: len(target)]
        except Exception as error:
            future.set_exception(error)
            return
        target[: len(content)] = torch.from_numpy(content)
        future.set_result(len(content))

    def answer_all(self) -> None:
        while self.asked:
            self.answer()

    def close(self) -> None:
        self.answer_all()
        self.closed = True


class ThreadReader:
    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(2)

    def read(self, path: str, target: torch.Tensor) -> Future[int]:
        return self.threads.submit(lambda: self._read(path, target))

    def close(self) -> None:
        self.threads.shutdown()

    def _read(self, path: str, target: torch.Tensor) -> int:
        content = np.fromfile(path, np.uint8)
        target[: len(content)] = torch.from_numpy(content)
        return len(content)


class Bench:
    """A store with CHAIN on NVMe alone, and direct loads from it."""

    def __init__(self, root: Path, *, timeout_s: float = 60.0) -> None:
        fill(root)
        self.root = root / "store"
        self.store = open_store(root)
        self.device = ToyDevice(random.Random(1).randrange)
        self.reader = ToyReader()
        self.loads = DirectLoads(
            self.store, self.device, self.reader, num_rows=NUM_ROWS, timeout_s=timeout_s
        )

    def begin(self, start: int = 0) -> DirectRead:
        self.device.drain()  # so that rows are free
        read = self.loads.begin(KEYS, start)
        assert read is not None
        return read

    def finish(self, read: DirectRead) -> list[bytes]:
        """What it serves."""
        self.reader.answer_all()
        self.loads.wait(read)
        return [view.numpy().tobytes() for view in self.loads.views(read)]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.loads.close()
    bench.store.close()


def _contents(start: int, stop: int) -> list[bytes]:
    return [content_of(CHAIN[: index + 1], CHUNK_BYTES) for index in range(start, stop)]


# What is served


def test_a_run_comes_as_it_was_stored_without_a_slot_in_dram(bench: Bench) -> None:
    read = bench.begin()
    assert bench.finish(read) == _contents(0, NUM_ROWS), "as many as there are rows"
    bench.loads.complete(read)
    rest = bench.begin(NUM_ROWS)
    assert bench.finish(rest) == _contents(NUM_ROWS, 4)
    bench.loads.complete(rest)
    stats = bench.store.stats()
    assert stats["hit_chunks"] == {"dram": 0, "nvme": 4}
    assert stats["nvme"]["direct_chunks"] == 4
    assert stats["missed_chunks"] == stats["dram"]["slots_used"] == 0


def test_threads_may_read_while_the_caller_waits(bench: Bench) -> None:
    reader = ThreadReader()
    loads = DirectLoads(bench.store, CpuDevice(), reader, num_rows=4, timeout_s=60.0)
    read = loads.begin(KEYS)
    assert read is not None
    loads.wait(read)
    assert [view.numpy().tobytes() for view in loads.views(read)] == _contents(0, 4)
    loads.complete(read)
    loads.close()


def test_a_transfer_takes_verified_chunks_to_pages(bench: Bench) -> None:
    pool = torch.zeros(LAYOUT.shape(4 * CHUNK_TOKENS), dtype=torch.float32)
    kv = PagedKV.of_slots(pool)
    transfer = Transfer(bench.device, staging_bytes=CHUNK_BYTES)
    read = bench.begin()
    bench.finish(read)
    copies = [
        ChunkCopy(kv, np.arange(i * CHUNK_TOKENS, (i + 1) * CHUNK_TOKENS), slot, CHUNK_TOKENS)
        for i, slot in enumerate(bench.loads.views(read))
    ]
    job = transfer.load(copies, by_layer=True)
    transfer.wait([job])
    assert transfer.poll() == [job]
    bench.loads.complete(read)
    for index, content in enumerate(_contents(0, NUM_ROWS)):
        tokens = pool[:, :, index * CHUNK_TOKENS :][:, :, :CHUNK_TOKENS]
        assert bytes_of(tokens) == content
    transfer.close()


def test_reads_may_end_in_any_order(bench: Bench) -> None:
    read = bench.begin()
    for _ in range(NUM_ROWS):
        bench.loads.poll()
        assert not read.ready
        bench.reader.answer(-1)
    assert bench.finish(read) == _contents(0, NUM_ROWS)


def test_nothing_waits_but_wait_and_close(bench: Bench) -> None:
    read = bench.begin()
    bench.reader.answer_all()
    while not read.ready:
        bench.loads.poll()
        bench.device.step()
    bench.loads.views(read)
    bench.loads.complete(read)
    assert bench.begin(NUM_ROWS)
    assert bench.device.num_blocked == 0


def test_a_reader_gets_no_row_before_the_stream_is_past_all_that_used_it(bench: Bench) -> None:
    choose = random.Random(1)
    device = ToyDevice(lambda count: 0 if count == 3 else choose.randrange(count))  # time stands
    loads = DirectLoads(bench.store, device, bench.reader, num_rows=1, timeout_s=60.0)
    assert loads.begin(KEYS) is None, "its memory may be in use by what had it before"
    device.drain()
    read = loads.begin(KEYS)
    assert read is not None
    bench.reader.answer_all()
    loads.poll()
    assert read.checking
    loads.complete(read)
    assert loads.begin(KEYS) is None, "its digest is being taken"
    device.drain()
    assert loads.begin(KEYS) is not None
    device.drain()
    loads.close()


def test_a_row_given_back_while_it_is_read_is_lent_to_nobody(bench: Bench) -> None:
    bench.loads.complete(bench.begin())
    bench.device.drain()
    assert bench.loads.begin(KEYS) is None
    bench.reader.answer(1)
    read = bench.begin()
    assert len(read.rows) == 1
    assert bench.finish(read) == _contents(0, 1)


def test_views_of_a_read_under_way_and_completing_twice_are_mistakes(bench: Bench) -> None:
    read = bench.begin()
    with pytest.raises(ValueError, match="ready"):
        bench.loads.views(read)
    bench.loads.complete(read)
    with pytest.raises(ValueError, match="twice"):
        bench.loads.complete(read)


# What is not


def _flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("at", [0, 60, 150, 4095, 4096, 4096 + CHUNK_BYTES - 1])
def test_one_flipped_bit_ends_the_run_and_drops_the_chunk(bench: Bench, at: int) -> None:
    read = bench.begin()
    _flip(Path(read.load.files[1].path), at)
    assert bench.finish(read) == _contents(0, 1)
    bench.loads.complete(read)
    stats = bench.store.stats()
    assert stats["nvme"]["corrupt_chunks"] == 1
    assert (stats["hit_chunks"]["nvme"], stats["missed_chunks"]) == (1, 3)
    assert bench.store.lookup(KEYS).num_chunks == 1
    assert bench.loads.begin(KEYS[:2], 1) is None, "never offered again"


def test_a_file_of_another_chunk_is_not_served(bench: Bench) -> None:
    read = bench.begin()
    first, second, _ = (Path(file.path) for file in read.load.files)
    first.write_bytes(second.read_bytes())
    assert bench.finish(read) == []


@pytest.mark.parametrize("size", [0, 100, 4096, 4096 + CHUNK_BYTES - 1])
def test_a_short_file_is_not_served_though_the_row_held_the_rest(bench: Bench, size: int) -> None:
    bench.finish(read := bench.begin())
    bench.loads.complete(read)  # each row holds what it will be asked for next
    read = bench.begin()
    with Path(read.load.files[0].path).open("r+b") as file:
        file.truncate(size)
    assert bench.finish(read) == []
    bench.loads.complete(read)
    assert bench.store.lookup(KEYS).num_chunks == 0


def test_a_missing_file_is_dropped_and_reading_goes_on(bench: Bench) -> None:
    read = bench.begin()
    Path(read.load.files[2].path).unlink()
    assert bench.finish(read) == _contents(0, 2)
    bench.loads.complete(read)
    assert bench.store.lookup(KEYS).num_chunks == 2
    assert bench.begin()


def test_a_reader_that_fails_is_used_no_more_and_the_chunks_stay(bench: Bench) -> None:
    read = bench.begin()
    bench.reader.broken = RuntimeError("no driver")
    assert bench.finish(read) == []
    bench.loads.complete(read)
    assert bench.store.stats()["nvme"]["corrupt_chunks"] == 0
    assert bench.loads.begin(KEYS) is None
    assert len(bench.store.get(KEYS)) == 4, "through DRAM"


def test_a_device_that_refuses_a_launch_is_asked_no_more_and_the_chunks_stay(bench: Bench) -> None:
    read = bench.begin()
    bench.device.launches_left = 1
    assert bench.finish(read) == _contents(0, 1)
    bench.loads.complete(read)
    assert bench.loads.begin(KEYS) is None
    assert bench.store.lookup(KEYS).num_chunks == 4


def test_what_is_late_is_a_miss_and_stays(tmp_path: Path) -> None:
    bench = Bench(tmp_path, timeout_s=0.0)
    read = bench.begin()
    bench.reader.answer(0)
    bench.loads.wait(read)
    assert read.ready
    assert read.num_chunks <= 1
    bench.loads.complete(read)
    assert bench.store.lookup(KEYS).num_chunks == 4
    bench.loads.close()
    bench.store.close()


@pytest.mark.parametrize("ready", [False, True])
def test_after_invalidate_nothing_is_served(bench: Bench, ready: bool) -> None:
    read = bench.begin()
    if ready:
        bench.finish(read)
    bench.store.invalidate()
    assert bench.finish(read) == []
    bench.loads.complete(read)
    assert bench.store.stats()["hit_chunks"]["nvme"] == 0
    assert bench.store.stats()["nvme"]["corrupt_chunks"] == 0, "gone is not corrupt"


def test_with_the_store_closed_nothing_is_served(bench: Bench) -> None:
    read = bench.begin()
    bench.store.close()
    assert bench.finish(read) == []
    bench.loads.complete(read)


# Closing


def test_close_gives_all_back_and_waits_for_reader_and_stream(bench: Bench) -> None:
    bench.begin()
    bench.reader.answer(0)
    bench.loads.poll()
    bench.loads.close()
    bench.loads.close()
    assert bench.reader.closed
    assert bench.store.stats()["missed_chunks"] == 0, "a request that never was"
    assert not bench.device.streams[-1].queue
    assert bench.store.stats()["open_loads"] == 0
    bench.store.check_integrity()
    assert bench.loads.begin(KEYS) is None


def test_closed_it_holds_no_memory_of_the_device(bench: Bench) -> None:
    buffer = weakref.ref(bench.loads._rows[0].staged)
    bench.finish(read := bench.begin())
    bench.loads.complete(read)
    bench.loads.close()
    del read
    gc.collect()
    assert buffer() is None


# At any time, among everything else


class DirectMachine(LendingMachine):
    """Files are spoilt, evicted, written over and dropped while they are read."""

    common = (*LendingMachine.common, "begin", "begin", "answer", "poll_reads", "complete")

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[DirectRead] = []
        self.device = ToyDevice(random.Random(1).randrange)
        self.new_loads()

    def new_loads(self) -> None:
        self.reader = ToyReader()
        self.loads = DirectLoads(
            self.store, self.device, self.reader, num_rows=NUM_ROWS, timeout_s=60.0
        )

    def begin(self, rng: random.Random) -> None:
        for chain in self.readable(rng):
            if read := self.loads.begin(keys_of(chain), rng.randrange(len(chain))):
                self.reads.append(read)
                self.lent.append(read.load)
                break

    def answer(self, rng: random.Random) -> None:
        if self.reader.asked:
            self.reader.answer(rng.randrange(len(self.reader.asked)))

    def poll_reads(self, rng: random.Random) -> None:
        self.loads.poll()

    def complete(self, rng: random.Random) -> None:
        if not self.reads:
            return
        read = self.reads.pop(rng.randrange(len(self.reads)))
        if rng.random() < 0.5:
            self.reader.answer_all()
            self.loads.wait(read)
            assert read.ready
        if read.ready:
            for file, view in zip(read.load.files, self.loads.views(read), strict=False):
                self.check_served(file.meta.key, view.numpy().tobytes())
        self.loads.complete(read, used=rng.random() < 0.5)
        self.lent.remove(read.load)

    def invalidate(self, rng: random.Random) -> None:
        super().invalidate(rng)
        assert not any(self.loads.views(read) for read in self.reads if read.ready)

    def close(self, rng: random.Random) -> None:
        if rng.random() < 0.5:
            self.store.close()
            self.loads.poll()
            assert all(not self.loads.views(read) for read in self.reads)
        self.close_loads()
        self.store.close()
        self.store = self.open()
        self.new_loads()

    def close_loads(self) -> None:
        self.loads.close()
        assert not self.reader.asked, "somebody may still write to memory that was given away"
        self.reads.clear()
        self.lent.clear()

    def check(self) -> None:
        super().check()
        rows = [*self.loads._rows, *(row for read in self.reads for row in read.rows)]
        assert len({id(row) for row in rows}) == len(rows) == NUM_ROWS
        targets = [target.data_ptr() for _, target, _ in self.reader.asked]
        assert len(set(targets)) == len(targets), "two reads into one row"

    def tear_down(self) -> None:
        self.close_loads()
        assert self.store.stats()["open_loads"] == 0
        super().tear_down()


@lending
@given(steps=DirectMachine.steps())
def test_whatever_happens_while_it_is_read_right_bytes_are_served_or_none(
    steps: list[tuple[str, int]],
) -> None:
    DirectMachine().run(steps)
