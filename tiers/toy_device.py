"""A device in main memory for tests, whose streams work late and in any order that events allow.

What is given to a stream waits in its queue. Whoever blocks on an event, or asks for one, lets
time pass: the device then does pieces of work, each of a stream that `choose` picks. A copy that
should wait for an event and does not, or an owner that reuses memory too early, ends with wrong
bytes on some choice.

The engine's own work is either a stream like the others, `compute`, or the caller's: what it
launches is done when the call returns, as by a model on the CPU whose copies alone run beside it.
"""

import ctypes
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

from .device import Event
from .dma import Spans

Choose = Callable[[int], int]
"""Any number below the one given, which is at least 1: Random(seed).randrange, for one."""

_JUNK = 0xA5
_MOST_STEPS = 2
"""That pass while an event is asked for."""


class ToyDevice:
    def __init__(
        self,
        choose: Choose,
        *,
        compute: Literal["stream", "caller"] = "stream",
        can_batch: bool = False,
    ) -> None:
        self._choose = choose
        self._compute_is_caller = compute == "caller"
        self._running = False
        self.in_place = False
        self.can_batch = can_batch
        self.pinned = True
        """Whether all main memory is."""
        self.launches_left: int | None = None
        """How many more it takes before it refuses every one; None for no end."""
        self.num_blocked = 0
        """How often the caller waited for an event."""
        self.now_ms = 0
        self.compute = ToyStream(self, urgent=False)
        self.streams = [self.compute]

    def stream(self, *, urgent: bool) -> "ToyStream":
        self.streams.append(ToyStream(self, urgent))
        return self.streams[-1]

    def compute_event(self) -> "ToyEvent":
        if self._compute_is_caller:
            return ToyEvent(self, self.now_ms)
        return self.compute.record()

    def hold_compute(self, event: Event) -> None:
        if self._compute_is_caller:
            self.run_until(event)
        else:
            self.compute.wait(event)

    def is_pinned(self, memory: torch.Tensor) -> bool:
        return self.pinned

    def copy_spans(self, spans: Spans) -> None:
        assert self.can_batch
        assert self._running, "copied outside of a stream's work"
        left = list(zip(spans.targets, spans.sources, spans.sizes_bytes, strict=True))
        while left:  # a batch has no order
            target, source, size_bytes = left.pop(self._choose(len(left)))
            ctypes.memmove(int(target), int(source), int(size_bytes))

    def step(self) -> bool:
        """One piece of work; False if no stream has one that it may do."""
        able = [stream for stream in self.streams if stream.able]
        if able:
            able[self._choose(len(able))].step()
        return bool(able)

    def run_until(self, event: Event) -> None:
        assert isinstance(event, ToyEvent)
        while event.at_ms is None:
            assert self.step(), "waits for an event that can never be past"

    def drain(self) -> None:
        """Do all work that was given."""
        while self.step():
            pass
        assert not any(stream.queue for stream in self.streams), "streams wait for each other"

    def let_time_pass(self) -> None:
        for _ in range(self._choose(_MOST_STEPS + 1)):
            self.step()

    def launch(self) -> None:
        """Count one. RuntimeError if it is refused."""
        if self.launches_left == 0:
            raise RuntimeError("the toy refuses a launch")
        if self.launches_left is not None:
            self.launches_left -= 1

    def do(self, work: Callable[[], None]) -> None:
        self._running = True
        try:
            with torch.inference_mode():  # as on a GPU
                work()
        finally:
            self._running = False


@dataclass(slots=True, eq=False)
class ToyEvent:
    device: ToyDevice
    at_ms: int | None = None
    """When the stream was past it; None before."""

    def query(self) -> bool:
        self.device.let_time_pass()
        return self.at_ms is not None

    def synchronize(self) -> None:
        self.device.num_blocked += 1
        self.device.run_until(self)

    def elapsed_time(self, end: "ToyEvent", /) -> float:
        assert self.at_ms is not None
        assert end.at_ms is not None
        return end.at_ms - self.at_ms


@dataclass(frozen=True, slots=True)
class ToyWait:
    event: ToyEvent


@dataclass(slots=True, eq=False)
class ToyStream:
    device: ToyDevice
    urgent: bool
    queue: deque[Callable[[], None] | ToyEvent | ToyWait] = field(
        default_factory=deque[Callable[[], None] | ToyEvent | ToyWait], init=False
    )

    def run(self, work: Callable[[], None]) -> None:
        self.device.launch()
        self.queue.append(work)

    def wait(self, event: Event) -> None:
        assert isinstance(event, ToyEvent)
        self.queue.append(ToyWait(event))

    def record(self) -> ToyEvent:
        self.queue.append(event := ToyEvent(self.device))
        return event

    def empty(self, size_bytes: int) -> torch.Tensor:
        return torch.full((size_bytes,), _JUNK, dtype=torch.uint8)

    @property
    def able(self) -> bool:
        """Whether it has something to do that waits for nothing."""
        if not self.queue:
            return False
        head = self.queue[0]
        return not isinstance(head, ToyWait) or head.event.at_ms is not None

    def step(self) -> None:
        assert self.able
        match self.queue.popleft():
            case ToyWait():
                pass
            case ToyEvent() as event:
                self.device.now_ms += 1
                event.at_ms = self.device.now_ms
            case work:
                self.device.do(work)
