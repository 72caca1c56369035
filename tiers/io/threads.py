"""The IO side as threads of this process: no start-up, but a share of the interpreter lock."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from ..arena import ArenaMapping
from .base import CLOSE_TIMEOUT_S, MAX_IN_FLIGHT, Completion, IoBackend, Job, Status, no_pause
from .engine import Engine


class ThreadBackend(IoBackend):
    """A thread with an asyncio loop, and one more per lane.

    close() waits for a system call under way however long the device takes: a thread cannot be
    ended from outside, and its slot must not be given away.
    """

    max_in_flight = MAX_IN_FLIGHT

    def __init__(
        self,
        root: Path,
        arena: ArenaMapping,
        *,
        lanes: int,
        itemsize: int,
        pause: Callable[[str], None] = no_pause,
    ) -> None:
        self._done: deque[Completion] = deque()
        self._some_done = threading.Event()
        self._in_flight = 0
        self._engine = Engine(
            root, arena, self._report, lanes=lanes, itemsize=itemsize, pause=pause
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="rootcellar-io", daemon=True)
        self._thread.start()
        self._closed = False

    def submit(self, jobs: Sequence[Job]) -> None:
        if self._in_flight + len(jobs) > self.max_in_flight:
            raise ValueError(f"more than max_in_flight, {self.max_in_flight}, jobs are in flight")
        self._in_flight += len(jobs)
        if self._closed:
            self._done.extend(Completion(job.job_id, Status.UNAVAILABLE) for job in jobs)
        else:
            self._engine.put(jobs)

    def poll(self) -> list[Completion]:
        done = [self._done.popleft() for _ in range(len(self._done))]
        self._in_flight -= len(done)
        return done

    def wait(self, timeout_s: float) -> None:
        self._some_done.clear()
        if not self._done:  # one that comes after this look sets the event
            self._some_done.wait(timeout_s)

    @property
    def alive(self) -> bool:
        return not self._closed

    @property
    def restarts(self) -> int:
        return 0

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        asyncio.run_coroutine_threadsafe(self._engine.stop(CLOSE_TIMEOUT_S), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(self._engine.start)
        self._loop.run_forever()

    def _report(self, done: Completion) -> None:
        self._done.append(done)
        self._some_done.set()
