"""What transfers promise, each promise alone."""

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import cast

import numpy as np
import pytest
import torch

from rootcellar.kernels.paged import PagedKV
from rootcellar.tiers.device import CpuDevice, CpuStream, PastEvent
from rootcellar.tiers.movers import ChunkCopy
from rootcellar.tiers.toy_device import ToyDevice, ToyEvent, ToyWait
from rootcellar.tiers.transfer import Transfer

from .toy_engine import (
    CHUNK_BYTES,
    LAYERS,
    PAGES,
    ROW_BYTES,
    SLOTS,
    ToyEngine,
    set_mover,
    small_limits,
)

MOVERS = ["in place", "staged", "batched"]
STAGING_BYTES = 2 * ROW_BYTES  # so small that jobs come in batches


@pytest.fixture(autouse=True)
def _small_limits() -> Iterator[None]:
    with small_limits():
        yield


def _open(
    mover: str = "staged", *, in_flight_bytes: int = 1 << 20
) -> tuple[ToyDevice, ToyEngine, Transfer]:
    """Nothing is done on this device until somebody blocks, or steps."""
    device = ToyDevice(lambda _: 0)
    set_mover(device, mover)
    engine = ToyEngine(device)
    engine.write(range(PAGES), seed=1)
    transfer = Transfer(device, staging_bytes=STAGING_BYTES, in_flight_bytes=in_flight_bytes)
    return device, engine, transfer


def _chunks(engine: ToyEngine, count: int, start: int = 0) -> list[ChunkCopy]:
    """Pages 0 and 1 and slot 0, pages 2 and 3 and slot 1, …"""
    return [engine.copy([2 * n, 2 * n + 1], n) for n in range(start, start + count)]


def test_stores_give_way_to_the_engine_and_loads_do_not() -> None:
    device, _, _ = _open()
    assert [stream.urgent for stream in device.streams[1:]] == [False, False, True, True]


def test_batches_take_turns_so_that_one_gathers_while_another_is_on_the_link() -> None:
    device, engine, transfer = _open()
    transfer.store(_chunks(engine, 8))
    transfer.load(_chunks(engine, 8))
    launched = [sum(map(callable, stream.queue)) for stream in device.streams[1:]]
    assert launched == [4, 4, 4, 4]


def test_stores_wait_for_a_poll_once_enough_is_in_flight() -> None:
    device, engine, transfer = _open(in_flight_bytes=2 * CHUNK_BYTES)
    job = transfer.store(_chunks(engine, 6))
    assert len(job.launched) == 1
    assert transfer.poll() == []
    assert len(job.launched) == 1
    device.drain()
    assert transfer.poll() == []
    assert len(job.launched) == 2


def test_a_load_overtakes_stores_that_are_queued() -> None:
    device, engine, transfer = _open(in_flight_bytes=1)
    first, second = transfer.store(_chunks(engine, 2)), transfer.store(_chunks(engine, 2, 2))
    load = transfer.load(_chunks(engine, 1, 5))
    assert first.launched
    assert not second.launched
    device.drain()
    assert transfer.poll() == [first, load]
    assert second.launched


def test_a_load_counts_as_in_flight_for_stores() -> None:
    _, engine, transfer = _open(in_flight_bytes=CHUNK_BYTES)
    transfer.load(_chunks(engine, 1))
    assert not transfer.store(_chunks(engine, 1, 1)).launched


def test_waiting_for_a_store_launches_what_is_queued_before_it() -> None:
    _, engine, transfer = _open(in_flight_bytes=1)
    first, second = transfer.store(_chunks(engine, 3)), transfer.store(_chunks(engine, 3, 3))
    transfer.wait([second])
    assert second.done
    transfer.wait([first])
    assert transfer.poll() == [first, second]
    assert transfer.poll() == []
    for n in range(6):
        assert engine.slot(n) == engine.chunk([2 * n, 2 * n + 1])


@pytest.mark.parametrize("launched", [0, 1, 2, 3])
def test_a_store_that_cannot_be_launched_is_given_up_and_others_go_on(
    launched: int, caplog: pytest.LogCaptureFixture
) -> None:
    device, engine, transfer = _open()
    device.launches_left = launched
    lost = transfer.store(_chunks(engine, 4))
    device.launches_left = None
    kept = transfer.store(_chunks(engine, 1, 5))
    assert "a store was given up" in caplog.text
    transfer.wait([lost, kept])
    assert transfer.poll() == [lost, kept]
    assert str(lost.error) == "the toy refuses a launch"
    assert kept.error is None
    assert engine.slot(5) == engine.chunk([10, 11])


def test_a_store_given_up_is_done_once_what_it_had_launched_is() -> None:
    device, engine, transfer = _open("in place")
    device.launches_left = 1
    job = transfer.store(_chunks(engine, 2))
    assert job.error is not None
    assert not job.done
    assert transfer.poll() == []
    device.drain()
    assert engine.slot(0) == engine.chunk([0, 1])
    assert transfer.poll() == [job]


def test_a_load_that_cannot_be_launched_raises_once_nothing_is_under_way() -> None:
    device, engine, transfer = _open("in place")
    device.launches_left = 1
    with pytest.raises(RuntimeError, match="the toy refuses a launch"):
        transfer.load(_chunks(engine, 2))
    device.launches_left = None
    engine.slots[0] = 0xFF  # the owner's again, as are the pages
    engine.write([0, 1, 2, 3], seed=2)
    device.drain()
    assert engine.pages.tobytes() == engine.model.tobytes()
    assert transfer.poll() == []


class _Interrupted(ToyDevice):
    """Once, at the second launch that it is asked for."""

    num_launches = 0

    def launch(self) -> None:
        self.num_launches += 1
        if self.num_launches == 2:
            raise KeyboardInterrupt


def _interrupted(in_flight_bytes: int) -> tuple[ToyEngine, Transfer]:
    device = _Interrupted(lambda _: 0)
    set_mover(device, "in place")
    transfer = Transfer(device, staging_bytes=STAGING_BYTES, in_flight_bytes=in_flight_bytes)
    engine = ToyEngine(device)
    engine.model[:] = engine.pages[:] = 1
    return engine, transfer


@pytest.mark.parametrize("verb", ["store", "load"])
def test_nothing_is_under_way_of_what_an_interrupt_came_between(verb: str) -> None:
    engine, transfer = _interrupted(in_flight_bytes=1 << 20)
    with pytest.raises(KeyboardInterrupt):
        getattr(transfer, verb)(_chunks(engine, 3))
    engine.slots[:] = 0xFF  # the owner's again, as are the pages
    engine.pages[:] = 2
    assert transfer.poll() == []
    engine.device.drain()
    assert engine.slots.numpy().tobytes() == b"\xff" * SLOTS * CHUNK_BYTES
    assert engine.pages.tobytes() == b"\2" * engine.pages.size


def test_a_batch_that_an_interrupt_came_between_is_launched_again() -> None:
    engine, transfer = _interrupted(in_flight_bytes=1)
    first, second = transfer.store(_chunks(engine, 1)), transfer.store(_chunks(engine, 1, 1))
    engine.device.drain()
    with pytest.raises(KeyboardInterrupt):
        transfer.poll()
    transfer.wait([second])
    assert transfer.poll() == [first, second]
    assert second.error is None
    assert engine.slot(1) == engine.chunk([2, 3])


def test_layers_are_launched_first_to_last_and_compute_waits_for_its_own_alone() -> None:
    device, engine, transfer = _open()
    job = transfer.load(_chunks(engine, 6), by_layer=True)
    starts = [part.batch.planes.start for part in job.launched]
    assert starts == sorted(starts)
    device.compute.queue.clear()
    job.wait_for_layer(1)
    ends = [part.end for part in job.launched if part.batch.planes == range(2, 4)]
    assert len(ends) == 3
    assert [wait.event for wait in device.compute.queue if isinstance(wait, ToyWait)] == ends
    assert device.num_blocked == 0


def test_layers_that_are_small_arrive_together(monkeypatch: pytest.MonkeyPatch) -> None:
    _, engine, transfer = _open()
    layer_bytes = CHUNK_BYTES // LAYERS
    monkeypatch.setattr("rootcellar.tiers.batches.LAYER_BYTES", layer_bytes + 1)
    job = transfer.load(_chunks(engine, 1), by_layer=True)
    assert [part.batch.planes for part in job.launched] == [range(4), range(4, 6)]


def test_a_load_that_is_not_by_layer_is_waited_for_as_a_whole() -> None:
    device, engine, transfer = _open()
    job = transfer.load(_chunks(engine, 6))
    waits = len(device.compute.queue)
    job.wait_for_layer(1)
    assert len(device.compute.queue) == waits + len(job.launched) == waits + 3


def test_copies_of_several_kinds_share_a_job() -> None:
    device, engine, transfer = _open()
    rows = torch.arange(4 * 100, dtype=torch.uint8).view(4, 100)
    kv, slot = PagedKV.of_rows([rows]), torch.zeros(300, dtype=torch.uint8)
    other = ChunkCopy(kv, np.array([3, 0, 2]), slot, 3)
    job = transfer.store([*_chunks(engine, 1), other, *_chunks(engine, 1, 1)])
    assert len(job.launched) == 3
    assert job.num_bytes == 2 * CHUNK_BYTES + 300
    device.drain()
    assert slot.tolist() == rows[[3, 0, 2]].flatten().tolist()
    assert engine.slot(1) == engine.chunk([2, 3])


def test_the_time_of_a_job_is_from_its_first_copy_to_its_last() -> None:
    device, engine, transfer = _open()
    job = transfer.store(_chunks(engine, 6))
    device.drain()
    ends = [cast(ToyEvent, part.end).at_ms for part in job.launched]
    start = cast(ToyEvent, job.start).at_ms
    assert start is not None
    assert job.taken_s == (max(end for end in ends if end is not None) - start) / 1000


def test_a_job_of_nothing_is_done_at_once() -> None:
    device, _, transfer = _open()
    store, load = transfer.store([]), transfer.load([])
    assert transfer.poll() == [store, load]
    assert store.taken_s == store.num_bytes == 0
    transfer.wait([store, load])
    assert device.num_blocked == 0


def test_a_store_is_of_whole_chunks_and_fits_a_buffer() -> None:
    _, engine, transfer = _open()
    with pytest.raises(ValueError, match=r"a store of 1 pages, must be whole: 2"):
        transfer.store([engine.copy([3], 0)])
    pages = np.arange(4)
    large = ChunkCopy(PagedKV.of_rows([torch.zeros(4, 300)]), pages, torch.zeros(4800), 4)
    with pytest.raises(ValueError, match="a chunk takes 4864 bytes, buffers have 512"):
        transfer.store([large])
    with pytest.raises(ValueError, match="a chunk takes 4864 bytes, buffers have 512"):
        transfer.load([large])
    assert transfer.poll() == []


def test_main_memory_is_done_when_the_call_returns() -> None:
    engine = ToyEngine(ToyDevice(lambda _: 0))
    engine.pages[:] = np.arange(engine.pages.size, dtype=np.uint8).reshape(engine.pages.shape)
    before = engine.pages.copy()
    transfer = Transfer(CpuDevice(), staging_bytes=STAGING_BYTES)
    store = transfer.store(_chunks(engine, 6))
    assert store.done
    engine.pages[:] = 0
    load = transfer.load(_chunks(engine, 6), by_layer=True)
    load.wait_for_layer(0)
    assert engine.pages[:, :, :12].tobytes() == before[:, :, :12].tobytes()
    assert transfer.poll() == [store, load]
    assert load.taken_s > 0


def test_a_poll_asks_little_however_much_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[ToyEvent]()

    def query(event: ToyEvent) -> bool:
        asked.append(event)
        return event.at_ms is not None

    device, engine, transfer = _open()
    jobs = [transfer.load(_chunks(engine, 6), by_layer=True) for _ in range(20)]
    monkeypatch.setattr(ToyEvent, "query", query)
    assert transfer.poll() == []
    assert len(asked) == 20 * 9 + 20  # once for what is in flight, once for each job
    device.drain()
    asked.clear()
    assert transfer.poll() == jobs
    assert len(asked) == 2 * 20 * 9


def test_close_gives_up_what_is_queued_and_waits_for_the_rest() -> None:
    _, engine, transfer = _open(in_flight_bytes=1)
    launched, queued = transfer.store(_chunks(engine, 2)), transfer.store(_chunks(engine, 2, 2))
    transfer.close()
    assert transfer.poll() == [launched, queued]
    assert launched.error is None
    assert engine.slot(1) == engine.chunk([2, 3])
    assert str(queued.error) == "the transfer was closed"
    transfer.close()
    with pytest.raises(RuntimeError, match="the transfer is closed"):
        transfer.store(_chunks(engine, 1))
    with pytest.raises(RuntimeError, match="the transfer is closed"):
        transfer.load(_chunks(engine, 1))
    assert transfer.poll() == []


class _Watched(CpuDevice):
    """Knows what is left of the streams and buffers that it gave out, and fails when told to."""

    in_place = False

    def __init__(self) -> None:
        self.fails = False
        self.left = weakref.WeakSet[object]()

    def stream(self, *, urgent: bool) -> CpuStream:
        self.left.add(stream := _WatchedStream(self))
        return stream


class _WatchedStream(CpuStream):
    def __init__(self, device: _Watched) -> None:
        self._device = device

    def run(self, work: Callable[[], None]) -> None:
        if self._device.fails:
            raise RuntimeError("the device failed")
        work()

    def empty(self, size_bytes: int) -> torch.Tensor:
        self._device.left.add(buffer := super().empty(size_bytes))
        return buffer


@pytest.mark.parametrize("failure", ["none", "store", "load", "wait"])
def test_close_leaves_no_stream_buffer_or_job_also_after_errors(
    failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, engine = _Watched(), ToyEngine(ToyDevice(lambda _: 0))
    transfer = Transfer(device, staging_bytes=STAGING_BYTES)
    assert len(device.left) == 8
    jobs = [transfer.store(_chunks(engine, 6)), transfer.load(_chunks(engine, 1))]
    # A log record that pytest keeps would keep the frames of the failure.
    monkeypatch.setattr(logging.getLogger("rootcellar.tiers.transfer"), "disabled", True)
    device.fails = failure in ("store", "load")
    if failure == "store":
        jobs.append(transfer.store(_chunks(engine, 6)))
    if failure == "load":
        with pytest.raises(RuntimeError, match="the device failed"):
            transfer.load(_chunks(engine, 6))
    if failure == "wait":
        monkeypatch.setattr(PastEvent, "synchronize", _fail)
        with pytest.raises(RuntimeError, match="the device failed"):
            transfer.close()
    else:
        transfer.close()
    assert transfer.poll() == jobs
    gc.collect()
    assert list(device.left) == []
    watched: list[Callable[[], object]] = [weakref.ref(engine.kv), weakref.ref(engine.slots)]
    del engine, jobs
    gc.collect()
    assert [ref() for ref in watched] == [None, None]


def _fail(event: PastEvent) -> None:
    raise RuntimeError("the device failed")


def test_a_job_keeps_pages_and_slots_alive_until_a_poll_told_of_it() -> None:
    device, _, transfer = _open()
    kv, slot = PagedKV.of_rows([torch.ones(2, 8)]), torch.zeros(64, dtype=torch.uint8)
    watched: list[Callable[[], object]] = [weakref.ref(kv), weakref.ref(slot)]
    transfer.store([ChunkCopy(kv, np.arange(2), slot, 2)])
    del kv, slot
    gc.collect()
    assert None not in [ref() for ref in watched]
    device.drain()
    transfer.poll()
    gc.collect()
    assert [ref() for ref in watched] == [None, None]


def test_a_device_that_is_too_full_says_so_before_anything_depends_on_it() -> None:
    class Full(_Watched):
        def stream(self, *, urgent: bool) -> CpuStream:
            raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError):
        Transfer(Full(), staging_bytes=STAGING_BYTES)
