"""A CUDA device as transfers see it: torch's streams and events, the driver's batched copies."""

from collections.abc import Callable
from typing import Any

import torch

from .device import Event, Stream
from .dma import BatchCopy, Spans

_cuda: Any = torch.cuda  # which is typed in parts only


class CudaDevice:
    in_place = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lowest, self._highest = _cuda.Stream.priority_range()
        self._batch = BatchCopy.find()
        self.can_batch = self._batch is not None

    def stream(self, *, urgent: bool) -> Stream:
        priority = self._highest if urgent else self._lowest
        return CudaStream(_cuda.Stream(self._device, priority=priority))

    def compute_event(self) -> Event:
        event: Event = _cuda.current_stream(self._device).record_event()
        return event

    def hold_compute(self, event: Event) -> None:
        _cuda.current_stream(self._device).wait_event(event)

    def is_pinned(self, memory: torch.Tensor) -> bool:
        # torch looks where a tensor's storage begins, which for a slot may be the arena: that is
        # pinned piece by piece, so the slot is asked for with a storage of its own.
        return memory.is_cpu and torch.from_numpy(memory.numpy()).is_pinned()

    def copy_spans(self, spans: Spans) -> None:
        assert self._batch is not None
        self._batch.copy(spans, _cuda.current_stream(self._device).cuda_stream)


class CudaStream:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def run(self, work: Callable[[], None]) -> None:
        # The engine may have made its KV cache in inference mode: written in no other, then.
        with _cuda.stream(self._stream), torch.inference_mode():
            work()

    def wait(self, event: Event) -> None:
        self._stream.wait_event(event)

    def record(self) -> Event:
        event: Event = _cuda.Event(enable_timing=True)
        self._stream.record_event(event)
        return event

    def empty(self, size_bytes: int) -> torch.Tensor:
        # torch reuses what it gives out here for this stream alone, in order.
        with _cuda.stream(self._stream):
            return torch.empty(size_bytes, dtype=torch.uint8, device=self._stream.device)
