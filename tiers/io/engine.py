"""Runs jobs on lanes: an asyncio loop starts and supervises them, and is out of the way per chunk.

A lane is one call in a thread that drains the queue. Between two chunks there is no await, no
future and no hop to the loop; the loop only hears of jobs that came and of lanes that ran dry.
"""

import asyncio
import os
import uuid
from collections import deque
from collections.abc import Callable, Container, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from ..arena import ArenaMapping
from ..chunk_file import INDEX, supports_o_direct
from ..index_writer import IndexWriter
from .base import Completion, Job, ReadJob, Status
from .lane import Lane

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
        self._threads = ThreadPoolExecutor(lanes, "rootcellar-lane")
        self._running: dict[int, asyncio.Future[None]] = {}

    def put(self, jobs: Iterable[Job]) -> None:
        """Queue jobs, from any thread; dispatch() must follow on the loop."""
        self._queue.put(jobs)

    def dispatch(self) -> None:
        """Start a lane for each waiting job, as far as lanes are idle. On the loop."""
        loop = asyncio.get_running_loop()
        for number in self._queue.lanes_wanted(self._running):
            lane = loop.run_in_executor(self._threads, self._drain, number)
            self._running[number] = lane
            lane.add_done_callback(partial(self._ran_dry, number))

    async def stop(self, timeout_s: float) -> None:
        """Finish what is queued, within the timeout, and commit the index.

        What is not begun by then is UNAVAILABLE; a job that is under way is always waited for.
        """
        self.dispatch()
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while self._running:
            left_s = deadline_s - asyncio.get_running_loop().time()
            await asyncio.wait(self._running.values(), timeout=max(0.0, left_s))
            if left_s <= 0:
                self._refuse_rest()
                await asyncio.wait(self._running.values())
        self._threads.shutdown()
        self._index.close()

    def _drain(self, number: int) -> None:
        lane = self._lanes[number]
        while (job := self._queue.take(number)) is not None:
            self._report(lane.run(job))

    def _ran_dry(self, number: int, lane: asyncio.Future[None]) -> None:
        del self._running[number]
        lane.result()  # lanes do not raise; if one ever does, the loop logs it
        self.dispatch()  # a job may have come after the lane's last look

    def _refuse_rest(self) -> None:
        for job in self._queue.take_all():
            self._report(Completion(job.job_id, Status.UNAVAILABLE))


def _pop(jobs: deque[Job]) -> Job | None:
    try:
        return jobs.popleft()
    except IndexError:
        return None
