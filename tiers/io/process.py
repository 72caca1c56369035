"""The IO side as a process of its own, where the caller's interpreter lock cannot delay it."""

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from ..arena import ArenaMapping
from ..errors import TierError
from .base import CLOSE_TIMEOUT_S, MAX_IN_FLIGHT, Completion, IoBackend, Job, Status
from .life import Birth, WorkerLife

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 5.0

_log = logging.getLogger(__name__)


class ProcessBackend(IoBackend):
    """Feeds one worker process after another; a thread waits for each to die.

    That thread only waits, marks the dead and starts the next; the caller's thread takes over a
    new life when it has drained the old one.

    lock_fd: of the directory's lock, which the worker shares for as long as it runs.
    hold: a pause point at which the first worker stops, for tests.
    """

    max_in_flight = MAX_IN_FLIGHT

    def __init__(
        self,
        root: Path,
        arena: ArenaMapping,
        *,
        lanes: int,
        itemsize: int,
        lock_fd: int,
        hold: str = "",
    ) -> None:
        self._birth = Birth(root, arena, lock_fd, lanes, itemsize)
        try:
            self._life: WorkerLife | None = WorkerLife(self._birth, hold)
        except OSError as error:
            raise TierError(f"the IO process for {root} cannot be started: {error}") from error
        self._next_life: WorkerLife | None = None
        self._done: list[Completion] = []
        self._in_flight = 0
        self._restarts = 0
        self._closing = threading.Event()
        self._watcher = threading.Thread(
            target=self._watch, args=(self._life,), name="rootcellar-watch", daemon=True
        )
        self._watcher.start()

    @property
    def worker_pid(self) -> int | None:
        """Of the process that serves now; None while there is none."""
        return self._life.pid if self.alive and self._life is not None else None

    def submit(self, jobs: Sequence[Job]) -> None:
        if self._in_flight + len(jobs) > self.max_in_flight:
            raise ValueError(f"more than max_in_flight, {self.max_in_flight}, jobs are in flight")
        self._in_flight += len(jobs)
        if self.alive and self._life is not None:
            self._life.send(jobs)
        else:
            self._done += [Completion(job.job_id, Status.UNAVAILABLE) for job in jobs]

    def poll(self) -> list[Completion]:
        self._advance()
        done, self._done = self._done, []
        if self._life is not None:
            done += self._life.take()
        self._in_flight -= len(done)
        return done

    def wait(self, timeout_s: float) -> None:
        self._advance()
        if self._done:
            return
        if self._life is None:
            time.sleep(timeout_s)
        else:
            self._life.wait(timeout_s)

    @property
    def alive(self) -> bool:
        self._advance()
        return self._life is not None and not self._life.dead

    @property
    def restarts(self) -> int:
        return self._restarts

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        self._advance()
        if self._life is not None:
            self._life.finish()
            while not self._life.dead and time.monotonic() < deadline_s:
                self._life.push()
                self._life.wait(0.1)
            self._life.kill()  # without effect on one that ended by itself
        self._watcher.join()
        self._advance()

    def _advance(self) -> None:
        """Drain a life that ended, take over the one that began; send on what was left over."""
        if self._life is not None and self._life.dead:
            self._done += self._life.take()
            self._life.release()
            self._life = None
        if self._life is None and self._next_life is not None:
            self._life, self._next_life = self._next_life, None
        if self._life is not None:
            self._life.push()

    # The watcher's thread --------------------------------------------------------------------

    def _watch(self, life: WorkerLife | None) -> None:
        delay_s = FIRST_DELAY_S
        while True:
            born_s = time.monotonic()
            status = None if life is None else life.wait_dead()
            if self._closing.is_set():
                return
            if time.monotonic() - born_s > 2 * LONGEST_DELAY_S:
                delay_s = FIRST_DELAY_S
            _log.warning("the IO process ended (%s); a new one starts in %.1f s", status, delay_s)
            if self._closing.wait(delay_s):
                return
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)
            life = self._start_next()

    def _start_next(self) -> WorkerLife | None:
        try:
            self._next_life = life = WorkerLife(self._birth)
        except OSError as error:
            _log.warning("the IO process cannot be started: %s", error)
            return None
        self._restarts += 1
        if self._closing.is_set():
            life.kill()  # close() may not have seen it, and waits for this thread
        return life
