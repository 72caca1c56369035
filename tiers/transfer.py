"""Moves chunks between an engine's pages and slots, beside the engine's own work.

    engine      kernels write pages --*                                         next step ...
    write lane                        '-> gather -> copy to slot --*  a poll finds it done

    load lane   copy from slot -> scatter --*   layer after layer
    engine                                  '-> attention of that layer

Write streams have the lowest priority, load streams the highest. A direction has two lanes, so that
one gathers while the other is on the link. Whoever asks for a job owns its pages and slots until
the job is done, and until then nobody else may write them.
"""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from .batches import in_batches
from .device import Device, Event
from .movers import Batch, ChunkCopy, Lane, mover_for

_log = logging.getLogger(__name__)

IN_FLIGHT_BYTES = 256 << 20
"""Stores are launched until this much is under way, loads included; then they wait for a poll."""

_LANES = 2


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class _Launched:
    batch: Batch
    num_bytes: int
    end: Event


@dataclass(slots=True, eq=False, repr=False)
class CopyJob:
    """One call of store() or load(). Keeps the memory of pages and slots alive until it is done."""

    device: Device
    loads: bool
    """Slots to pages; else pages to slots."""
    pinned: bool
    """Whether the device reads and writes all slots by itself."""
    after: Sequence[Event]
    """What its copies wait for: the engine's work on the pages."""
    waiting: deque[Batch]
    launched: list[_Launched] = field(default_factory=list[_Launched])
    start: Event | None = None
    error: Exception | None = None
    """Why a store was given up; its slots may hold anything."""

    @property
    def done(self) -> bool:
        """Whether nothing of it is under way, or will be."""
        # The last first: while it is under way, nobody need ask for the others.
        return not self.waiting and all(part.end.query() for part in reversed(self.launched))

    @property
    def num_bytes(self) -> int:
        """Moved, or on their way."""
        return sum(part.num_bytes for part in self.launched)

    @property
    def taken_s(self) -> float:
        """Seconds on the device, from its first copy to its last, once it is done."""
        if self.start is None:
            return 0.0
        return max(self.start.elapsed_time(part.end) for part in self.launched) / 1000

    def wait_for_layer(self, index: int) -> None:
        """What the engine launches from now on finds that layer's pages loaded. Never blocks."""
        for part in self.launched:
            layer, planes = part.batch.kv.layer(index), part.batch.planes
            if planes.start < layer.stop and layer.start < planes.stop:
                # Compute waits for the load lane: attention reads what the layer's scatter wrote.
                self.device.hold_compute(part.end)


class Transfer:
    """For one thread. Nothing waits but wait(), close(), and a store() or load() that raises.

    Owns its lanes, and keeps every job until poll() has told of it.

    staging_bytes: of each of four buffers on the device, which are made at once, so that a device
        too full for them says so before anything depends on them; at least a chunk of each kind.
    """

    def __init__(
        self, device: Device, *, staging_bytes: int, in_flight_bytes: int = IN_FLIGHT_BYTES
    ) -> None:
        self._device = device
        self._staging_bytes = staging_bytes
        self._in_flight_bytes = in_flight_bytes
        self._write_lanes = self._lanes(urgent=False)
        self._load_lanes = self._lanes(urgent=True)
        self._queue: deque[CopyJob] = deque()
        """Stores that are not launched to their end."""
        self._jobs: list[CopyJob] = []
        """Those that poll() has not told of."""
        self._open: list[_Launched] = []
        """Under way when last seen."""

    def store(self, copies: Sequence[ChunkCopy], after: Sequence[Event] = ()) -> CopyJob:
        """Pages to slots, whole chunks each, once the engine's current stream has done what it was
        given so far, and past the events `after`, of other streams that write the pages.

        A launch that fails gives the job up, which then has an `error`. ValueError for a copy that
        is no whole chunk, or that no buffer has room for.
        """
        short = next((copy for copy in copies if len(copy.pages) != copy.pages_per_chunk), None)
        if short is not None:
            raise ValueError(
                f"a store of {len(short.pages)} pages, must be whole: {short.pages_per_chunk}"
            )
        job = self._job(False, copies, after)
        try:
            self._jobs.append(job)
            if job.waiting:
                self._queue.append(job)
            self._launch_stores()
        except BaseException:  # an interrupt, say
            self._take_back(job)
            raise
        return job

    def load(
        self, copies: Sequence[ChunkCopy], after: Sequence[Event] = (), *, by_layer: bool = False
    ) -> CopyJob:
        """Slots to pages, launched at once. What the engine was given so far, and what the events
        `after` stand for, may still read or write those pages; nothing later may before
        wait_for_layer(), or before the job is done.

        by_layer: the first layers of all chunks arrive first. The copies then share one kv.
        Raises what a launch raises, once nothing is under way; pages may then hold anything.
        """
        job = self._job(True, copies, after, by_layer=by_layer)
        try:
            self._jobs.append(job)
            while job.waiting:
                self._launch(job, self._load_lanes)
        except BaseException:
            self._take_back(job)
            raise
        return job

    def poll(self) -> list[CopyJob]:
        """The jobs that ended since the last call; launches stores that waited for it."""
        self._open = [part for part in self._open if not part.end.query()]
        self._launch_stores()
        running, ended = list[CopyJob](), list[CopyJob]()
        for job in self._jobs:
            (ended if job.done else running).append(job)
        self._jobs = running
        return ended

    def wait(self, jobs: Sequence[CopyJob]) -> None:
        """Block until those are done; poll() still tells of them."""
        while any(job.waiting for job in jobs):
            self._launch_store()
        for job in jobs:
            for part in job.launched:
                part.end.synchronize()

    def close(self) -> None:
        """Give up what is not launched, wait for the rest, release streams and buffers. Idempotent;
        poll() still tells of what ended."""
        for job in self._queue:
            _give_up(job, RuntimeError("the transfer was closed"))
        self._queue.clear()
        try:
            self.wait(self._jobs)
        finally:
            self._write_lanes.clear()
            self._load_lanes.clear()
            self._open.clear()

    def _lanes(self, *, urgent: bool) -> deque[Lane]:
        """They take turns: the first is the next."""
        # Kernels that reach slots themselves have no use for a buffer.
        staging_bytes = 0 if self._device.in_place else self._staging_bytes
        streams = [self._device.stream(urgent=urgent) for _ in range(_LANES)]
        return deque(Lane(stream, stream.empty(staging_bytes)) for stream in streams)

    def _job(
        self,
        loads: bool,
        copies: Sequence[ChunkCopy],
        after: Sequence[Event],
        *,
        by_layer: bool = False,
    ) -> CopyJob:
        if not self._load_lanes:
            raise RuntimeError("the transfer is closed")
        # First: it refuses copies that do not fit.
        waiting = deque(in_batches(copies, self._staging_bytes, by_layer=by_layer))
        pinned = all(self._device.is_pinned(copy.slot) for copy in copies)
        events = (self._device.compute_event(), *after)
        return CopyJob(self._device, loads, pinned, events, waiting)

    def _take_back(self, job: CopyJob) -> None:
        """Whoever asked for it gets no job to ask, and uses pages and slots again at once: nothing
        of it may be under way, or launched later, when this returns."""
        job.waiting.clear()
        for jobs in (self._jobs, self._queue):
            if job in jobs:
                jobs.remove(job)
        self.wait([job])

    def _launch_stores(self) -> None:
        while self._queue and sum(part.num_bytes for part in self._open) < self._in_flight_bytes:
            self._launch_store()

    def _launch_store(self) -> None:
        """The next batch of the store that came first."""
        job = self._queue[0]
        try:
            self._launch(job, self._write_lanes)
        except Exception as error:
            # The engine has its KV and goes on: only the copy is lost.
            _log.exception("a store was given up")
            _give_up(job, error)
        if not job.waiting:
            self._queue.popleft()

    def _launch(self, job: CopyJob, lanes: deque[Lane]) -> None:
        batch, lane, stream = job.waiting[0], lanes[0], lanes[0].stream
        lanes.rotate(-1)
        mover = mover_for(self._device, batch.kv, pinned=job.pinned)
        # Its first batch on this lane, since lanes take turns and no other job of its direction is
        # launched between two batches of one: those after are behind it.
        if len(job.launched) < len(lanes):
            for event in job.after:
                # Write lane waits for compute: the KV must be written. Load lane waits for compute:
                # kernels under way may still read these pages, or have the memory they lie in.
                stream.wait(event)
        if job.start is None:
            job.start = stream.record()
        try:
            (mover.load if job.loads else mover.store)(lane, batch)
        finally:
            # If it failed, too: what it had launched by then reads and writes all the same.
            launched = _Launched(batch, batch.num_bytes, stream.record())
            job.launched.append(launched)
            self._open.append(launched)
        job.waiting.popleft()


def _give_up(job: CopyJob, error: Exception) -> None:
    job.waiting.clear()
    job.error = error.with_traceback(None)  # whose frames would keep lanes and buffers alive
