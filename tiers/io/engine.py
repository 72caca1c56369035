"""Runs jobs on lanes: an asyncio loop starts and supervises them, and is out of the way per chunk.

A lane is a thread that lasts as long as the engine. It drains the queue, and rests when
it is empty; whoever puts jobs wakes as many resting lanes as there is work for. Between two chunks
there is no await, no future and no hop to the loop, and from a job's arrival to its lane only one.
"""

import asyncio
import logging
import os
import threading
import uuid
from collections import deque
from collections.abc import Callable, Container, Iterable
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from ..arena import ArenaMapping
from ..chunk_file import INDEX, supports_o_direct
from ..index_writer import IndexWriter
from .base import Completion, Job, ReadJob, Status
from .lane import Lane

_log = logging.getLogger(__name__)

READS_PER_WRITE = 8
"""With a single lane, reads that may go before a waiting write."""


class JobQueue:
    """Which job a lane does next. Lanes take from it in their own threads.

    The first lane prefers what is not a read, so writes go on however many reads there are; the
    last one takes reads only, so a read never waits for all lanes to be through with a write.
    """

    def __init__(self, num_lanes: int) -> None:
        self._last = num_lanes - 1
        self._reads: deque[Job] = deque()
        self._others: deque[Job] = deque()
        self._reads_in_a_row = 0

    def put(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            (self._reads if isinstance(job, ReadJob) else self._others).append(job)

    def take(self, lane: int) -> Job | None:
        if self._last == 0:
            return self._take_alone()
        if lane == 0:
            return _pop(self._others) or _pop(self._reads)
        return _pop(self._reads) or (_pop(self._others) if lane < self._last else None)

    def take_all(self) -> list[Job]:
        jobs: list[Job] = []
        while job := _pop(self._reads) or _pop(self._others):
            jobs.append(job)
        return jobs

    def lanes_wanted(self, busy: Container[int]) -> list[int]:
        """Idle lanes that would find something to do: at most one for each waiting job."""
        idle = [lane for lane in range(self._last + 1) if lane not in busy]
        writers = [lane for lane in idle if lane < max(1, self._last)][: len(self._others)]
        readers = [lane for lane in reversed(idle) if lane not in writers]
        return writers + readers[: len(self._reads)]

    def _take_alone(self) -> Job | None:
        if self._others and self._reads_in_a_row >= READS_PER_WRITE:
            self._reads_in_a_row = 0
            return _pop(self._others)
        self._reads_in_a_row += 1
        return _pop(self._reads) or _pop(self._others)


class Engine:
    """Lanes and index of one store directory. start() and stop() run on the loop that owns it."""

    def __init__(
        self,
        root: Path,
        arena: ArenaMapping,
        report: Callable[[Completion], None],
        *,
        lanes: int,
        itemsize: int,
        pause: Callable[[str], None],
    ) -> None:
        """report: called in a lane's thread as each job ends, exactly once for each."""
        self._report = report
        self._queue = JobQueue(lanes)
        self._index = IndexWriter(root / INDEX, pause)
        direct = os.O_DIRECT if supports_o_direct(root) else 0
        writer = uuid.uuid4().hex
        self._lanes = [
            Lane(
                str(root),
                arena,
                self._index,
                name=f"{writer}-{number}",
                itemsize=itemsize,
                direct=direct,
                pause=pause,
            )
            for number in range(lanes)
        ]
        self._running: dict[int, asyncio.Future[None]] = {}
        self._resting: set[int] = set()
        self._calls: list[SimpleQueue[None]] = [SimpleQueue() for _ in range(lanes)]
        self._stopping = False

    def start(self) -> None:
        """Start the lanes. On the loop."""
        for number in range(len(self._lanes)):
            self._start_lane(number)

    def put(self, jobs: Iterable[Job]) -> None:
        """Queue jobs and wake lanes for them, from any thread."""
        self._queue.put(jobs)
        busy = set(range(len(self._lanes))) - self._resting
        for number in self._queue.lanes_wanted(busy):
            if number in self._resting:
                self._resting.discard(number)
                self._calls[number].put(None)

    async def stop(self, timeout_s: float) -> None:
        """Finish what is queued, within the timeout, and commit the index.

        What is not begun by then is UNAVAILABLE; a job that is under way is always waited for.
        """
        self._stopping = True
        for call in self._calls:
            call.put(None)
        _, pending = await asyncio.wait(self._running.values(), timeout=timeout_s)
        if pending:
            for job in self._queue.take_all():
                self._report(Completion(job.job_id, Status.UNAVAILABLE))
            await asyncio.wait(pending)
        self._index.close()

    def _start_lane(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        self._running[number] = ended = loop.create_future()
        ended.add_done_callback(partial(self._ended, number))
        # A daemon, unlike an executor's threads: a store that nobody closed must not keep its
        # process from ending.
        threading.Thread(
            target=self._live, args=(number, ended), name=f"rootcellar-lane-{number}", daemon=True
        ).start()

    def _live(self, number: int, ended: asyncio.Future[None]) -> None:
        try:
            self._work(number)
        except BaseException:
            _log.exception("lane %d ended", number)
        ended.get_loop().call_soon_threadsafe(ended.set_result, None)

    def _ended(self, number: int, _: asyncio.Future[None]) -> None:
        if not self._stopping:  # lanes do not raise; if one ever does, the others need it back
            self._start_lane(number)

    def _work(self, number: int) -> None:
        lane = self._lanes[number]
        while (job := self._queue.take(number) or self._rest(number)) is not None:
            self._report(lane.run(job))

    def _rest(self, number: int) -> Job | None:
        """Wait for a job; None when there will be none."""
        while True:
            self._resting.add(number)
            job = self._queue.take(number)  # one that came before this lane was known to rest
            if job is not None or self._stopping:
                self._resting.discard(number)
                return job
            self._calls[number].get()


def _pop(jobs: deque[Job]) -> Job | None:
    try:
        return jobs.popleft()
    except IndexError:
        return None
