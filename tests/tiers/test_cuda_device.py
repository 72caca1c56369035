"""What is asked of torch.cuda, and in which order, by a stand-in that notes it down."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from rootcellar.tiers import cuda_device
from rootcellar.tiers.cuda_device import CudaDevice
from rootcellar.tiers.dma import BatchCopy, Spans

DEVICE = torch.device("cuda", 1)
META = torch.device("meta")  # allocates nothing, anywhere


@dataclass
class ToyEvent:
    enable_timing: bool = False


@dataclass
class ToyStream:
    device: torch.device
    priority: int = 0
    given: list[object] = field(default_factory=list[object])
    cuda_stream: int = 0x5EED

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -3  # least and greatest, as CUDA gives them

    def record_event(self, event: ToyEvent | None = None) -> ToyEvent:
        self.given.append(event := event or ToyEvent())
        return event

    def wait_event(self, event: ToyEvent) -> None:
        self.given.append(("waits", event))


class Cuda:
    """torch.cuda, as far as CudaDevice uses it."""

    Stream, Event = ToyStream, ToyEvent

    def __init__(self) -> None:
        self.engine = ToyStream(DEVICE)
        self.current = self.engine

    def current_stream(self, device: torch.device) -> ToyStream:
        assert device == DEVICE
        return self.current

    @contextmanager
    def stream(self, stream: ToyStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


@dataclass
class Batch:
    copied: list[tuple[Spans, int]] = field(default_factory=list[tuple[Spans, int]])

    def copy(self, spans: Spans, stream: int) -> None:
        self.copied.append((spans, stream))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    monkeypatch.setattr(cuda_device, "_cuda", cuda)
    return cuda


@pytest.fixture
def batch(monkeypatch: pytest.MonkeyPatch) -> Batch:
    batch = Batch()
    monkeypatch.setattr(BatchCopy, "find", lambda: batch)
    return batch


def _torch_stream(device: CudaDevice, *, urgent: bool) -> ToyStream:
    stream: Any = device.stream(urgent=urgent)
    found: ToyStream = stream._stream
    return found


def test_urgent_streams_have_the_highest_priority_and_others_the_lowest(cuda: Cuda) -> None:
    device = CudaDevice(DEVICE)
    assert _torch_stream(device, urgent=True) == ToyStream(DEVICE, -3)
    assert _torch_stream(device, urgent=False) == ToyStream(DEVICE, 0)


def test_the_engine_is_whatever_stream_is_current(cuda: Cuda) -> None:
    device = CudaDevice(DEVICE)
    event: Any = device.compute_event()
    device.hold_compute(event)
    assert cuda.engine.given == [event, ("waits", event)]
    cuda.current = other = ToyStream(DEVICE)
    second: Any = device.compute_event()
    assert other.given == [second]


def test_work_runs_on_its_stream_and_may_write_what_inference_mode_made(cuda: Cuda) -> None:
    with torch.inference_mode():
        kv = torch.zeros(2)
    device, seen = CudaDevice(DEVICE), list[ToyStream]()

    def work() -> None:
        seen.append(cuda.current)
        kv.copy_(torch.ones(2), non_blocking=True)

    stream: Any = device.stream(urgent=True)
    stream.run(work)
    assert seen == [stream._stream]
    assert kv.tolist() == [1, 1]
    assert cuda.current is cuda.engine


def test_a_stream_waits_for_events_and_times_its_own(cuda: Cuda) -> None:
    stream: Any = CudaDevice(DEVICE).stream(urgent=False)
    start = stream.record()
    stream.wait(start)
    assert stream._stream.given == [start, ("waits", start)]
    assert start.enable_timing


def test_memory_is_made_on_the_stream_that_will_use_it(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, empty = list[tuple[ToyStream, torch.device]](), torch.empty

    def noted(size_bytes: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made.append((cuda.current, device))
        return empty(size_bytes, dtype=dtype, device=META)

    stream: Any = CudaDevice(DEVICE).stream(urgent=True)
    monkeypatch.setattr(torch, "empty", noted)
    memory = stream.empty(7)
    assert made == [(stream._stream, DEVICE)]
    assert (memory.dtype, memory.shape) == (torch.uint8, (7,))


def test_a_slot_is_pinned_if_its_own_memory_is_not_if_the_arenas_first_is(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = torch.zeros((2, 64), dtype=torch.uint8)
    pinned = {arena[0].data_ptr()}

    def is_pinned(tensor: torch.Tensor) -> bool:
        """As torch does it."""
        return tensor.is_cpu and tensor.untyped_storage().data_ptr() in pinned

    monkeypatch.setattr(torch.Tensor, "is_pinned", is_pinned)
    device = CudaDevice(DEVICE)
    assert device.is_pinned(arena[0])
    assert not device.is_pinned(arena[1])
    pinned.add(arena[1].data_ptr())
    assert device.is_pinned(arena[1])


def test_memory_of_the_device_is_not_pinned(cuda: Cuda) -> None:
    assert not CudaDevice(DEVICE).is_pinned(torch.empty(8, dtype=torch.uint8, device=META))


def test_spans_go_to_the_driver_with_the_stream_that_runs(cuda: Cuda, batch: Batch) -> None:
    device, none = CudaDevice(DEVICE), np.empty(0, np.int64)
    assert device.can_batch
    spans = Spans(none, none, none)
    stream: Any = device.stream(urgent=False)
    stream.run(lambda: device.copy_spans(spans))
    assert batch.copied == [(spans, 0x5EED)]


def test_a_driver_without_batched_copies_is_told(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BatchCopy, "find", lambda: None)
    assert not CudaDevice(DEVICE).can_batch


@pytest.mark.parametrize("kind", ["Stream", "Event"])
def test_the_stand_in_has_no_method_that_torch_has_not(kind: str) -> None:
    own = {name for name in vars(getattr(Cuda, kind)) if not name.startswith("_")}
    absent_without_cuda = {"priority_range", "given", "priority", "device", "cuda_stream"}
    for name in own - absent_without_cuda - {"enable_timing"}:
        assert hasattr(getattr(torch.cuda, kind), name)
    for name in ("query", "synchronize", "elapsed_time"):
        assert hasattr(torch.cuda.Event, name)
