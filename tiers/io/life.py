"""One life of the worker process, seen from the caller: started, fed, listened to, waited for."""

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..arena import ArenaMapping
from .base import MAX_IN_FLIGHT, Completion, Job, Status
from .ring import RingReader, create_ring
from .wire import CLOSE, pack
from .worker import SHUT_OUT, WorkerConfig


@dataclass(frozen=True, slots=True)
class Birth:
    """What every life of one backend has in common."""

    root: Path
    arena: ArenaMapping
    lock_fd: int
    lanes: int
    itemsize: int


class WorkerLife:
    """Its ring, socket and doorbell are its own, so nothing of an earlier life can get into it.

    `wait_dead` is for the thread that watches it; all else is for the caller's thread.
    """

    def __init__(self, birth: Birth, hold: str = "") -> None:
        """Raises OSError when no process can be started."""
        self.dead = False
        """Set by the watcher once the process is gone for certain, with its hands off all slots."""
        self._jobs: set[int] = set()
        self._unsent = bytearray()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._watcher_bell = os.dup(self._bell)  # the watcher's: it may ring after release()
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        ring_fd = create_ring(MAX_IN_FLIGHT)
        self._ring = RingReader(ring_fd, MAX_IN_FLIGHT)
        config = WorkerConfig(
            root=str(birth.root),
            parent_pid=os.getpid(),
            socket_fd=theirs.fileno(),
            bell_fd=self._bell,
            ring_fd=ring_fd,
            arena_fd=birth.arena.fd,
            slot_bytes=birth.arena.slot_bytes,
            num_slots=birth.arena.num_slots,
            lanes=birth.lanes,
            itemsize=birth.itemsize,
            hold=hold,
        )
        try:
            self._process = _start(config, birth.lock_fd)
        except BaseException:
            self.release()
            os.close(self._watcher_bell)
            raise
        finally:
            theirs.close()
            os.close(ring_fd)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, jobs: Sequence[Job]) -> None:
        """Never blocks: what does not fit into the socket now goes with the next call."""
        self._jobs.update(job.job_id for job in jobs)
        self._unsent += pack(jobs)
        self.push()

    def push(self) -> None:
        """Send on what is left over, if anything is."""
        if self._unsent:
            try:
                del self._unsent[: self._socket.send(self._unsent)]
            except BlockingIOError:
                pass
            except OSError:
                self._unsent.clear()  # it is dying; its jobs come back when it is dead

    def take(self) -> list[Completion]:
        """What it completed since the last call; the rest, as UNAVAILABLE, once it is dead."""
        was_dead = self.dead  # read first: whatever it wrote before it died is in the ring then
        done = self._ring.take()
        self._jobs.difference_update(completion.job_id for completion in done)
        if was_dead:
            done += [Completion(job_id, Status.UNAVAILABLE) for job_id in sorted(self._jobs)]
            self._jobs.clear()
        return done

    def wait(self, timeout_s: float) -> None:
        """Until the doorbell rings, for a completion or for its death."""
        if self._ring.ready or self.dead:
            return
        waiting = select.poll()  # unlike select(), at home with any descriptor's number
        waiting.register(self._bell, select.POLLIN)
        if self._unsent:
            waiting.register(self._socket, select.POLLOUT)
        if self._bell in dict(waiting.poll(timeout_s * 1000)):
            os.eventfd_read(self._bell)

    def finish(self) -> None:
        """Ask it to finish what it has and end."""
        self._unsent += CLOSE
        self.push()

    def kill(self) -> None:
        self._process.kill()

    def wait_dead(self) -> int:
        """Block until the process is gone; returns its exit status."""
        status = self._process.wait()
        self.dead = True
        os.eventfd_write(self._watcher_bell, 1)
        os.close(self._watcher_bell)
        return status

    def release(self) -> None:
        """Give back memory and descriptors. Idempotent; it must be dead."""
        self._socket.close()
        self._ring.close()
        if self._bell >= 0:
            os.close(self._bell)
            self._bell = -1


def _start(config: WorkerConfig, lock_fd: int) -> "subprocess.Popen[bytes]":
    fds = (config.socket_fd, config.bell_fd, config.ring_fd, config.arena_fd, lock_fd)
    command = [sys.executable, "-P", "-m", "rootcellar.tiers.io.worker", config.to_json()]
    with _blocked_signals():
        return subprocess.Popen(
            command, pass_fds=fds, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """A new process inherits the mask, and is not hit before it can say what it ignores."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SHUT_OUT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
