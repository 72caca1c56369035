"""The toy device itself: what it does late, and what it catches."""

from collections.abc import Callable
from functools import partial
from random import Random

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from rootcellar.tiers.dma import Spans
from rootcellar.tiers.toy_device import Choose, ToyDevice, ToyEvent
from rootcellar.tiers.transfer import Transfer

from .toy_engine import CHUNK_BYTES, ToyEngine


def _never(count: int) -> int:
    """No time passes by itself."""
    return 0


def _at_once(count: int) -> int:
    return count - 1


def test_what_is_given_to_a_stream_is_done_in_order_and_not_at_once() -> None:
    device, done = ToyDevice(_never), list[int]()
    stream = device.stream(urgent=True)
    for number in range(3):
        stream.run(partial(done.append, number))
    end = stream.record()
    assert not end.query()
    assert done == []
    end.synchronize()
    assert done == [0, 1, 2]
    assert end.query()
    assert device.num_blocked == 1


@given(random=st.randoms(use_true_random=False))
def test_streams_run_in_any_order_that_their_waits_allow(random: Random) -> None:
    device, done = ToyDevice(random.randrange), list[str]()
    first, second = device.stream(urgent=True), device.stream(urgent=False)
    first.run(lambda: done.append("a"))
    event = first.record()
    first.run(lambda: done.append("b"))
    second.run(lambda: done.append("c"))
    second.wait(event)
    second.run(lambda: done.append("d"))
    device.drain()
    assert sorted(done) == ["a", "b", "c", "d"]
    assert done.index("a") < done.index("b")
    assert done.index("a") < done.index("d")
    assert done.index("c") < done.index("d")


def test_every_such_order_is_met() -> None:
    met = set[str]()
    for seed in range(50):
        device, done = ToyDevice(Random(seed).randrange), list[str]()
        for name in "abc":
            device.stream(urgent=False).run(partial(done.append, name))
        device.drain()
        met.add("".join(done))
    assert len(met) == 6


def test_time_passes_while_an_event_is_asked_for() -> None:
    device = ToyDevice(_at_once)
    event = device.stream(urgent=True).record()
    assert event.query()
    assert event.elapsed_time(event) == 0


def test_streams_that_wait_for_each_other_are_noticed() -> None:
    device = ToyDevice(_never)
    never = ToyEvent(device)
    device.compute.wait(never)
    with pytest.raises(AssertionError, match="can never be past"):
        never.synchronize()
    with pytest.raises(AssertionError, match="wait for each other"):
        device.drain()


def test_it_refuses_launches_when_told_to() -> None:
    device, done = ToyDevice(_never), list[int]()
    device.launches_left = 1
    device.compute.run(lambda: done.append(1))
    with pytest.raises(RuntimeError, match="refuses a launch"):
        device.compute.run(lambda: done.append(2))
    device.drain()
    assert done == [1]


def test_memory_that_it_gives_out_is_junk() -> None:
    assert ToyDevice(_never).compute.empty(3).tolist() == [0xA5] * 3


def test_spans_are_copied_in_any_order_and_only_by_a_stream() -> None:
    source, target = np.arange(6, dtype=np.uint8), np.zeros(6, np.uint8)
    starts = np.array([0, 4], np.int64)
    spans = Spans(source.ctypes.data + starts, target.ctypes.data + starts, np.array([3, 2]))
    device = ToyDevice(_at_once, can_batch=True)
    with pytest.raises(AssertionError, match="outside of a stream's work"):
        device.copy_spans(spans)
    device.compute.run(lambda: device.copy_spans(spans))
    device.drain()
    assert target.tolist() == [0, 1, 2, 0, 4, 5]


@pytest.mark.parametrize("choose", [_never, _at_once, Random(0).randrange])
def test_a_caller_that_computes_is_held_until_its_layer_is_there(choose: Choose) -> None:
    device = ToyDevice(choose, compute="caller")
    engine = ToyEngine(device)
    engine.slots[:] = 7
    transfer = Transfer(device, staging_bytes=4096)
    job = transfer.load([engine.copy([0, 1], 0)])
    job.wait_for_layer(0)
    assert engine.pages[:, :, :2].tobytes() == bytes([7]) * CHUNK_BYTES
    assert device.num_blocked == 0


def _forgets_to_wait_for_a_load(engine: ToyEngine, transfer: Transfer) -> bool:
    engine.slots[:] = 7
    transfer.load([engine.copy([0, 1], 0)])
    return engine.pages[:, :, :2].tobytes() == bytes([7]) * CHUNK_BYTES


def _takes_pages_back_before_a_store_is_done(engine: ToyEngine, transfer: Transfer) -> bool:
    engine.pages[:] = 7
    job = transfer.store([engine.copy([0, 1], 0)])
    engine.pages[:] = 8
    transfer.wait([job])
    return engine.slot(0) == bytes([7]) * CHUNK_BYTES


def _takes_slots_back_before_a_load_is_done(engine: ToyEngine, transfer: Transfer) -> bool:
    engine.slots[:] = 7
    job = transfer.load([engine.copy([0, 1], 0)])
    engine.slots[:] = 8
    transfer.wait([job])
    return engine.pages[:, :, :2].tobytes() == bytes([7]) * CHUNK_BYTES


@pytest.mark.parametrize(
    "mistake",
    [
        _forgets_to_wait_for_a_load,
        _takes_pages_back_before_a_store_is_done,
        _takes_slots_back_before_a_load_is_done,
    ],
)
def test_a_caller_that_computes_and_breaks_a_promise_sees_wrong_bytes(
    mistake: Callable[[ToyEngine, Transfer], bool],
) -> None:
    device = ToyDevice(_never, compute="caller")
    assert not mistake(ToyEngine(device), Transfer(device, staging_bytes=4096))
