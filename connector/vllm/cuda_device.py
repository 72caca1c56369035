"""What the GPU worker asks of CUDA, and torch's answer to it.

Tests have another Device, in main memory, whose streams run in any order that events allow.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch

_cuda: Any = torch.cuda  # which is typed in parts only
_PORTABLE = 1  # pinned for every CUDA context of the process
_HIGH, _LOW = -1, 0


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Whether the stream is past it."""
        ...

    def synchronize(self) -> None:
        """Block until it is."""

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from here to `end`, once both are past."""
        ...


class Stream(Protocol):
    """Does its work in the order given, beside every other stream's."""

    def run(self, work: Callable[[], None]) -> None:
        """Launch what `work` does with device memory."""

    def wait(self, event: Event) -> None:
        """Nothing given from now on starts before `event` is past."""

    def record(self) -> Event:
        """The point after everything given so far."""
        ...


class Device(Protocol):
    def stream(self, *, urgent: bool) -> Stream:
        """A new stream; urgent work is preferred to the engine's own."""
        ...

    def compute_event(self) -> Event:
        """The point after everything the engine launched so far."""
        ...

    def indices(self, blocks: torch.Tensor) -> torch.Tensor:
        """A copy of `blocks` on the device, by the stream that runs; does not wait for it."""
        ...

    def pin(self, address: int, size_bytes: int) -> int:
        """Page-lock host memory, from any thread; 0 or CUDA's error code."""
        ...

    def unpin(self, address: int) -> None: ...


class TorchCuda:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stream(self, *, urgent: bool) -> Stream:
        return TorchStream(_cuda.Stream(self._device, priority=_HIGH if urgent else _LOW))

    def compute_event(self) -> Event:
        event: Event = _cuda.current_stream(self._device).record_event()
        return event

    def indices(self, blocks: torch.Tensor) -> torch.Tensor:
        # From memory that is not pinned, the copy may block until its turn has come.
        return blocks.pin_memory().to(self._device, non_blocking=True)

    def pin(self, address: int, size_bytes: int) -> int:
        with _cuda.device(self._device):  # a new thread is on device 0, which may be another's
            return int(_cuda.cudart().cudaHostRegister(address, size_bytes, _PORTABLE))

    def unpin(self, address: int) -> None:
        _cuda.cudart().cudaHostUnregister(address)


class TorchStream:
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
