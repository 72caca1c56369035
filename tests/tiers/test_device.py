"""Main memory as a device, and how a device is told from tensors."""

import numpy as np
import pytest
import torch

from rootcellar.tiers.device import CpuDevice, device_of
from rootcellar.tiers.dma import Spans


def test_tensors_in_main_memory_lie_on_the_cpu() -> None:
    assert isinstance(device_of([torch.zeros(1)]), CpuDevice)


def test_tensors_elsewhere_are_refused() -> None:
    with pytest.raises(ValueError, match="the KV cache is on meta, must be on cpu or cuda"):
        device_of([torch.zeros(1, device="meta")])


@pytest.mark.parametrize("urgent", [True, False])
def test_work_in_main_memory_is_done_when_the_call_returns(urgent: bool) -> None:
    stream, done = CpuDevice().stream(urgent=urgent), list[int]()
    start = stream.record()
    stream.wait(start)
    stream.run(lambda: done.append(1))
    end = stream.record()
    assert done == [1]
    assert end.query()
    end.synchronize()
    assert start.elapsed_time(end) >= 0


def test_the_engine_is_never_ahead_of_main_memory() -> None:
    device = CpuDevice()
    event = device.compute_event()
    device.hold_compute(event)
    assert event.query()


def test_main_memory_has_no_link() -> None:
    device, none = CpuDevice(), np.empty(0, np.int64)
    assert device.in_place
    assert not device.can_batch
    assert not device.is_pinned(torch.zeros(1))
    with pytest.raises(NotImplementedError, match="main memory has no link"):
        device.copy_spans(Spans(none, none, none))


def test_memory_of_a_stream_has_the_size_that_was_asked_for() -> None:
    memory = CpuDevice().stream(urgent=True).empty(5)
    assert (memory.dtype, memory.shape) == (torch.uint8, (5,))
