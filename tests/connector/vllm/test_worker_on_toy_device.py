"""The worker on a device whose copies run late: what waits for what, what fails, what is let go."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from random import Random

import pytest
import torch

from rootcellar.connector.vllm.worker import SlotWorker, make_worker
from rootcellar.tiers.arena import SharedArena
from rootcellar.tiers.toy_device import ToyDevice, ToyEvent, ToyStream

from .toy_pages import Cache, Shape, Transfer, open_arena, worker_on

SHAPE = Shape(tensors=[(16, 24), (5, 5)], groups=[[(0, 16), (1, 5)]], blocks_per_chunk=2)
WAIT_S = 30.0
CHUNK = Transfer([(0, [3, 1])], [2])
OTHER = Transfer([(0, [5, 4])], [0])


class Engine:
    """What a worker works on and with."""

    def __init__(self) -> None:
        self.device = ToyDevice(Random(0).randrange)
        self.cache = Cache(SHAPE, seed=0)
        self.arena = open_arena(1, SHAPE)
        self.cuda = RecordingCuda(self.device)

    def worker(self, *, in_flight_bytes: int = 1 << 30) -> SlotWorker:
        layout = self.cache.layout()
        return worker_on(self.device, layout, in_flight_bytes=in_flight_bytes, cuda=self.cuda)

    def is_stored(self, transfer: Transfer) -> bool:
        return all(
            bytes(self.arena.buffer[at : at + size])
            == self.cache.memory[tensor][page : page + size].tobytes()
            for tensor, page, at, size in transfer.places(self.cache, self.arena.slot_bytes, 0)
        )


class RecordingCuda:
    """Registers everything. To unregister early would take memory from under a copy, and late is
    an address that may be anyone's."""

    def __init__(self, device: ToyDevice) -> None:
        self.device = device
        self.registered: Queue[int] = Queue()
        self.unregistered: list[int] = []
        self.early: list[int] = []
        self.late: list[int] = []

    def register(self, address: int, size_bytes: int, /) -> int:
        self.registered.put(address)
        return 0

    def unregister(self, address: int, /) -> int:
        self.unregistered.append(address)
        if any(stream.queue for stream in self.device.streams[1:]):
            self.early.append(address)
        if address not in _arenas_mapped():
            self.late.append(address)
        return 0

    def describe(self, code: int, /) -> str:
        raise AssertionError("nothing is refused")


def _arenas_mapped() -> set[int]:
    """Where this process maps arenas."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {int(line.split("-")[0], 16) for line in lines if "rootcellar-arena" in line}


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.arena.close()


def _submit_store(worker: SlotWorker, job_id: int, transfer: Transfer, arena: SharedArena) -> None:
    assert worker.submit_store(job_id, transfer.pages, transfer.into(arena))


def _ended(worker: SlotWorker) -> list[tuple[int, bool]]:
    return [(result.job_id, result.success) for result in worker.get_finished()]


def test_nothing_waits_until_it_is_asked_to(engine: Engine) -> None:
    worker, device = engine.worker(), engine.device
    _submit_store(worker, 1, CHUNK, engine.arena)
    worker.submit_load(2, OTHER.into(engine.arena), OTHER.pages)
    worker.get_finished()
    assert device.num_blocked == 0
    worker.wait({1})
    assert device.num_blocked
    assert engine.is_stored(CHUNK)
    worker.shutdown()


def test_a_store_that_waits_its_turn_is_launched_by_whoever_waits_for_it(engine: Engine) -> None:
    worker = engine.worker(in_flight_bytes=1)
    _submit_store(worker, 1, CHUNK, engine.arena)
    _submit_store(worker, 2, OTHER, engine.arena)
    engine.device.drain()
    assert engine.is_stored(CHUNK)
    assert not engine.is_stored(OTHER)
    worker.wait({2})
    assert engine.is_stored(OTHER)
    assert _ended(worker) == [(1, True), (2, True)]
    worker.shutdown()


def test_a_store_that_waits_its_turn_gets_it_from_steps_without_requests(engine: Engine) -> None:
    worker = engine.worker(in_flight_bytes=1)
    for job_id, transfer in enumerate([CHUNK, OTHER]):
        _submit_store(worker, job_id, transfer, engine.arena)
    told: list[tuple[int, bool]] = []
    while len(told) < 2:  # it steps for as long as a job is not told of
        told += _ended(worker)
        engine.device.drain()
    assert told == [(0, True), (1, True)]
    assert engine.is_stored(CHUNK)
    assert engine.is_stored(OTHER)
    worker.shutdown()


def test_a_store_that_cannot_be_launched_is_told_of_as_failed_and_others_go_on(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    worker = engine.worker()
    engine.device.launches_left = 0
    with caplog.at_level(logging.CRITICAL):
        _submit_store(worker, 1, CHUNK, engine.arena)
    engine.device.launches_left = None
    _submit_store(worker, 2, OTHER, engine.arena)
    worker.wait({1, 2})
    assert _ended(worker) == [(1, True), (2, True)]  # all that vLLM takes
    assert [worker.take_failed(), worker.take_failed()] == [{1}, set()]
    assert engine.is_stored(OTHER)
    worker.shutdown()


def test_a_store_that_fails_half_way_is_told_of_when_nothing_of_it_is_under_way(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    worker = engine.worker()
    both = Transfer([(0, [3, 1, 5, 4])], [2, 0])  # a launch of its own for each chunk
    engine.device.launches_left = 3
    with caplog.at_level(logging.CRITICAL):
        _submit_store(worker, 1, both, engine.arena)
    assert engine.device.streams[1].queue or engine.device.streams[2].queue
    while not (ended := _ended(worker)):
        engine.device.step()
    assert ended == [(1, True)]
    assert not any(stream.queue for stream in engine.device.streams[1:])
    assert worker.take_failed() == {1}
    worker.shutdown()


def test_a_load_that_cannot_be_launched_is_told_of_as_failed_once(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    worker = engine.worker()
    engine.device.launches_left = 0
    with caplog.at_level(logging.CRITICAL):
        assert worker.submit_load(1, CHUNK.into(engine.arena), CHUNK.pages)
    worker.wait({1})
    assert worker.take_failed() == set(), "before it is told of, vLLM does not ask"
    assert _ended(worker) == [(1, True)]
    assert worker.take_failed() == {1}
    assert _ended(worker) == []
    worker.shutdown()


@pytest.mark.parametrize("urgent", [False, True])
def test_what_cannot_be_launched_shows_when_an_engine_starts(
    engine: Engine, urgent: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(stream: ToyStream, work: Callable[[], None]) -> None:
        if stream.urgent is urgent:
            raise RuntimeError("no compiler")
        stream.queue.append(work)

    monkeypatch.setattr(ToyStream, "run", run)
    with caplog.at_level(logging.CRITICAL), pytest.raises(RuntimeError, match="no compiler"):
        engine.worker().warm_up()


def test_warming_up_leaves_nothing_behind(engine: Engine) -> None:
    before = [memory.tobytes() for memory in engine.cache.memory]
    worker = engine.worker()
    worker.warm_up()
    assert not any(stream.queue for stream in engine.device.streams[1:])
    assert _ended(worker) == []
    assert [memory.tobytes() for memory in engine.cache.memory] == before
    worker.shutdown()


def test_an_arena_is_pinned_while_it_is_attached(engine: Engine) -> None:
    worker, other = engine.worker(), open_arena(1, SHAPE)
    _submit_store(worker, 1, CHUNK, engine.arena)
    first = engine.cuda.registered.get(timeout=WAIT_S)
    assert engine.cuda.unregistered == []
    _submit_store(worker, 2, CHUNK, other)  # takes its place while a copy is under way
    assert engine.cuda.unregistered == [first]
    second = engine.cuda.registered.get(timeout=WAIT_S)
    worker.shutdown()
    assert engine.cuda.unregistered == [first, second]
    assert engine.cuda.early == engine.cuda.late == []
    assert engine.cuda.registered.empty()
    other.close()


def test_shutdown_unmaps_the_arena_though_jobs_were_not_told_of(engine: Engine) -> None:
    before, worker = _arenas_mapped(), engine.worker()
    _submit_store(worker, 1, CHUNK, engine.arena)
    assert len(_arenas_mapped() - before) == 1
    worker.shutdown()
    assert engine.is_stored(CHUNK)
    assert _arenas_mapped() == before
    assert _ended(worker) == []
    worker.shutdown()


def test_shutdown_unpins_though_the_device_fails(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(event: ToyEvent) -> None:
        engine.device.drain()
        raise RuntimeError("the device is lost")

    worker = engine.worker()
    _submit_store(worker, 1, CHUNK, engine.arena)
    address = engine.cuda.registered.get(timeout=WAIT_S)
    monkeypatch.setattr(ToyEvent, "synchronize", fail)
    with pytest.raises(RuntimeError, match="lost"):
        worker.shutdown()
    assert engine.cuda.unregistered == [address]
    assert engine.cuda.early == engine.cuda.late == []


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
