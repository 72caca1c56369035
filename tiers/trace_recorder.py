"""Records the store's traffic, so that `rootcellar tune` runs on the user's own day."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from itertools import repeat
from pathlib import Path

from ..admission.base import Chain, Key
from .trace_file import TraceFile, header

LEAST_BYTES = 1 << 12
MOST_WAITING = 1 << 18
"""Requests and chunks of theirs that may wait to be written."""

MOST_KNOWN = 1 << 17
"""Chunks remembered at least, and twice as many at most, to write a chain by what it shares."""

_DELAY_S = 0.1
_SLICE = 64
"""Chunks hashed at a stretch, in some 40 microseconds: the engine's thread may be waiting for the
interpreter lock."""
_PAUSE_S = 0.0005
_CLOSE_TIMEOUT_S = 10.0
_LINE_BYTES = 256
"""More than a line takes without its hashes."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Request:
    keys: tuple[Key, ...]
    now_s: float
    num_tokens: int


class TraceRecorder:
    """Writes what requests ask for, as hashes, to `path` and `path`.1, together within max_bytes.

    A chunk is written as 64 bits of BLAKE2b of its key, with a random key of its own that is kept
    nowhere: nobody can tell from the file whether a prompt they guess was among the requests, and
    two runs of a program have no hash in common.

    Only opening raises. What comes faster than it can be written is dropped and counted, and a
    disk that fails ends the recording, which the log says once.
    """

    def __init__(self, path: str | Path, *, max_bytes: int, chunk_tokens: int) -> None:
        """The directory must be there. A recording that is there already is continued.

        ValueError: max_bytes is too few, or `path` is no recording or has a recorder already.
        OSError: it cannot be opened.
        """
        if max_bytes < LEAST_BYTES:
            raise ValueError(f"max_bytes is {max_bytes}, must be at least {LEAST_BYTES}")
        self._file = TraceFile(Path(path), max_bytes)
        self._header = header(chunk_tokens, time.time(), secrets.token_hex(8))
        self._begun = False
        self._waiting: deque[_Request] = deque()
        # Each of these is written by one thread alone; what waits is the first two's difference.
        self._offered, self._taken = 0, 0
        self._refused, self._lost = 0, 0
        self._failed = False
        self._some = threading.Event()
        self._closing = threading.Event()
        self._lines = _Lines(self._pause)
        self._thread = threading.Thread(target=self._run, name="rootcellar-trace", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Requests that are not in the recording."""
        return self._refused + self._lost

    def record(self, keys: Chain, now_s: float, num_tokens: int) -> None:
        """A request with this chain and that many prompt tokens arrived at now_s, on a clock that
        never runs backwards.

        For one thread, which copies the chain here and never waits.
        """
        weight = 1 + len(keys)
        full = self._offered + weight - self._taken > MOST_WAITING
        if full or self._failed or self._closing.is_set():
            self._refused += 1
            return
        self._waiting.append(_Request(tuple(keys), now_s, num_tokens))
        self._offered += weight
        if not self._some.is_set():
            self._some.set()

    def close(self) -> None:
        """Write what waits and release the file. Idempotent; gives up on a disk that hangs."""
        self._closing.set()
        self._some.set()
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            _log.warning("the trace at %s is not complete: its disk does not answer", self._path)

    @property
    def _path(self) -> Path:
        return self._file.path

    def _run(self) -> None:
        """All below runs on the recorder's thread, the one that owns the file."""
        try:
            while not self._closing.is_set() or self._waiting:
                self._some.wait()
                self._closing.wait(_DELAY_S)
                # Cleared before taking: a request that comes in between sets it again.
                self._some.clear()
                while self._waiting:
                    self._write(self._waiting[0])
                    self._taken += 1 + len(self._waiting.popleft().keys)
        except (OSError, ValueError) as error:
            self._failed = True
            _log.warning("recording to %s has ended: %s", self._path, error)
            self._lost += len(self._waiting)
            self._waiting.clear()
        finally:
            self._file.close()

    def _write(self, request: _Request) -> None:
        if not self._begun:
            self._begin()
        line, new = self._lines.encode(request)
        if not self._file.fits(len(line)):
            if not self._file.could_fit(len(self._header) + _LINE_BYTES + 16 * len(request.keys)):
                self._lost += 1
                return
            self._file.rotate()
            self._begin()
            line, new = self._lines.encode(request)
        self._file.append(line)
        self._lines.written(new)

    def _begin(self) -> None:
        """A header; requests that follow refer to none before it."""
        if not self._file.fits(len(self._header)):
            self._file.rotate()
        self._file.append(self._header)
        self._lines.restart()
        self._begun = True

    def _pause(self) -> None:
        """Lets the engine's thread have the interpreter lock, unless it waits in close()."""
        self._closing.wait(_PAUSE_S)


class _Lines:
    """Writes each chain by what it shares with an earlier one since the last header."""

    def __init__(self, pause: Callable[[], None]) -> None:
        self._pause = pause
        self._hash = blake2b(digest_size=8, key=secrets.token_bytes(32))
        self._zero_s: float | None = None
        self.restart()

    def restart(self) -> None:
        self._count = 0
        # Key to a request that has it in its chain, where it stands at the same place in all.
        self._recent: dict[Key, int] = {}
        self._older: dict[Key, int] = {}

    def encode(self, request: _Request) -> tuple[bytes, tuple[Key, ...]]:
        """The line, and the chunks that are in it as hashes."""
        if self._zero_s is None:
            self._zero_s = request.now_s
        like, shared = self._shared(request.keys)
        reference = f'"like": {like}, "shared": {shared}, ' if shared else ""
        new = request.keys[shared:]
        line = (
            f'{{"t": {request.now_s - self._zero_s:.6f}, "n": {request.num_tokens}, {reference}'
            f'"new": "{self._hashes(new)}"}}\n'
        )
        return line.encode(), new

    def written(self, new: tuple[Key, ...]) -> None:
        """The line with these is in the file: later ones may refer to it."""
        self._recent.update(zip(new, repeat(self._count), strict=False))
        self._count += 1
        if len(self._recent) > MOST_KNOWN:
            self._older, self._recent = self._recent, {}

    def _shared(self, keys: tuple[Key, ...]) -> tuple[int, int]:
        """A request whose chain has the deepest key that is known, and how many lead up to it.

        From the tail, since a request seldom adds many to what another has.
        """
        for unknown, key in enumerate(reversed(keys)):
            like = self._recent.get(key)
            if like is None:
                like = self._older.get(key)
            if like is not None:
                return like, len(keys) - unknown
            if unknown % _SLICE == _SLICE - 1:
                self._pause()
        return 0, 0

    def _hashes(self, keys: tuple[Key, ...]) -> str:
        parts: list[str] = []
        for start in range(0, len(keys), _SLICE):
            if start:
                self._pause()
            parts += map(self._digest, keys[start : start + _SLICE])
        return "".join(parts)

    def _digest(self, key: Key) -> str:
        keyed = self._hash.copy()
        keyed.update(key)
        return keyed.hexdigest()
