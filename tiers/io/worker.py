"""The IO process: `python -P -m rootcellar.tiers.io.worker <WorkerConfig as JSON>`.

It owns nothing that outlives it: arena, ring, socket and lock are descriptors it inherited. When
its parent is gone, however that went, it ends at once, and the directory's lock with it.
"""

import asyncio
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ..arena import SharedArena
from ..directory import clear_temporaries
from .base import CLOSE_TIMEOUT_S, MAX_IN_FLIGHT, Completion, no_pause
from .engine import Engine
from .ring import RingWriter
from .wire import Unpacker

RECEIVE_BYTES = 1 << 20
SHUT_OUT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Meant for the parent, which may still want to write down what it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """What the worker is told. The *_fd are descriptors it inherits.

    hold: a pause point of the engine at which to stop (SIGSTOP) until someone says otherwise.
    """

    root: str
    parent_pid: int
    socket_fd: int
    bell_fd: int
    ring_fd: int
    arena_fd: int
    slot_bytes: int
    num_slots: int
    lanes: int
    itemsize: int
    hold: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def pause(self) -> Callable[[str], None]:
        return self._stop_here if self.hold else no_pause

    def _stop_here(self, point: str) -> None:
        if point == self.hold:
            # To this thread: it goes no further, while one to the process may first hit another.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


class _Worker:
    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._socket = socket.socket(fileno=config.socket_fd)
        self._ring = RingWriter(config.ring_fd, MAX_IN_FLIGHT)
        self._reporting = threading.Lock()
        self._unpacker = Unpacker()
        self._closing = asyncio.Event()
        clear_temporaries(Path(config.root))  # of the worker that died before this one
        self._engine = Engine(
            Path(config.root),
            SharedArena.attach(config.arena_fd, config.slot_bytes, config.num_slots),
            self._report,
            lanes=config.lanes,
            itemsize=config.itemsize,
            pause=config.pause,
        )

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        self._watch_parent(loop)
        self._engine.start()
        loop.add_reader(self._socket, self._receive)
        await self._closing.wait()
        await self._engine.stop(CLOSE_TIMEOUT_S)

    def _watch_parent(self, loop: asyncio.AbstractEventLoop) -> None:
        """The socket tells of its end too, unless a child that the parent forked keeps it open."""
        with suppress(OSError):  # gone already, or forbidden here
            loop.add_reader(os.pidfd_open(self._config.parent_pid), os._exit, 1)
        if os.getppid() != self._config.parent_pid:
            os._exit(1)

    def _receive(self) -> None:
        piece = self._socket.recv(RECEIVE_BYTES)
        if not piece and not self._unpacker.closing:
            os._exit(1)
        self._engine.put(self._unpacker.feed(piece))
        if self._unpacker.closing:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._closing.set()

    def _report(self, done: Completion) -> None:
        with self._reporting:
            self._ring.put(done)
        os.eventfd_write(self._config.bell_fd, 1)


async def _main(config: WorkerConfig) -> None:
    await _Worker(config).serve()


if __name__ == "__main__":
    for number in SHUT_OUT:
        signal.signal(number, signal.SIG_IGN)
    # They were blocked from birth, so that none came before this line.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SHUT_OUT)
    asyncio.run(_main(WorkerConfig(**json.loads(sys.argv[1]))))
