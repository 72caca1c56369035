"""What a transfer asks of the device that KV lies on, and main memory's answer to it.

A stream does its work in the order given, beside every other stream's; an event is a point in it.
toy_device.py has another Device for tests, whose streams run in any order that events allow.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .dma import Spans


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
    """Belongs to whoever made it, as does all memory that it gives out."""

    def run(self, work: Callable[[], None]) -> None:
        """Launch what `work` does with device memory."""

    def wait(self, event: Event) -> None:
        """Nothing given from now on starts before `event` is past."""

    def record(self) -> Event:
        """The point after everything given so far."""
        ...

    def empty(self, size_bytes: int) -> torch.Tensor:
        """Device memory that nothing but this stream's work may touch."""
        ...


class Device(Protocol):
    in_place: bool
    """Whether its kernels write slots themselves: then there is no link, and nothing to stage."""
    can_batch: bool
    """Whether it has copy_spans."""

    def stream(self, *, urgent: bool) -> Stream:
        """A new stream; urgent work is preferred to the engine's own, other work comes after it."""
        ...

    def compute_event(self) -> Event:
        """The point after everything the engine launched so far."""
        ...

    def hold_compute(self, event: Event) -> None:
        """What the engine launches from now on waits for `event`; the caller does not."""

    def is_pinned(self, memory: torch.Tensor) -> bool:
        """Whether the device reads and writes this main memory by itself."""
        ...

    def copy_spans(self, spans: Spans) -> None:
        """Copy all spans between device memory and pinned memory, on the stream that runs."""


class CpuDevice:
    """Main memory: everything is done when the call that asks for it returns."""

    in_place = True
    can_batch = False

    def stream(self, *, urgent: bool) -> "CpuStream":
        return CpuStream()

    def compute_event(self) -> "PastEvent":
        return PastEvent(time.perf_counter())

    def hold_compute(self, event: Event) -> None:
        """There is nothing to wait for."""

    def is_pinned(self, memory: torch.Tensor) -> bool:
        return False

    def copy_spans(self, spans: Spans) -> None:
        raise NotImplementedError("main memory has no link")


class CpuStream:
    def run(self, work: Callable[[], None]) -> None:
        work()

    def wait(self, event: Event) -> None:
        """It is past."""

    def record(self) -> "PastEvent":
        return PastEvent(time.perf_counter())

    def empty(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class PastEvent:
    at_s: float

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """It is past."""

    def elapsed_time(self, end: "PastEvent", /) -> float:
        return (end.at_s - self.at_s) * 1000


def device_of(tensors: Sequence[torch.Tensor]) -> Device:
    """The device that all of `tensors` lie on. ValueError unless it is a CPU or a CUDA device."""
    place = tensors[0].device
    if place.type == "cpu":
        return CpuDevice()
    if place.type == "cuda":
        from .cuda_device import CudaDevice  # CUDA is asked for where it is used, nowhere else

        return CudaDevice(place)
    raise ValueError(f"the KV cache is on {place}, must be on cpu or cuda")
