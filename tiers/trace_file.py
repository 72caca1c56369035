"""The file a trace is recorded to: one or more runs of JSON lines, and its forerunner beside it.

    header    {"format": "rootcellar-trace", "version": 1, "chunk_tokens": 256,
               "start_s": <seconds since the epoch>, "run": "<hex, random for each recorder>"}
    request   {"t": <seconds since the run's first request>, "n": <tokens of the prompt>,
               "like": 17, "shared": 40, "new": "<16 hex digits for each chunk>"}

Requests are counted from 0 after each header. A request's chain is the first `shared` chunks of
request `like`, both left out where there is none, and then the new ones. A file that is full goes
on as `<name>.1`, in place of the last of that name, and either can be read without the other.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

FORMAT = "rootcellar-trace"
VERSION = 1

_STEP = 1 << 16


def header(chunk_tokens: int, start_s: float, run: str) -> bytes:
    fields = {
        "format": FORMAT,
        "version": VERSION,
        "chunk_tokens": chunk_tokens,
        "start_s": start_s,
        "run": run,
    }
    return json.dumps(fields).encode() + b"\n"


def rotated(path: Path) -> Path:
    return path.with_name(path.name + ".1")


class TraceFile:
    """Appends whole lines to `path` and moves it aside before it holds more than half of
    max_bytes; the two together never exceed it, over any number of openings.

    Owned by one thread at a time. Every method may raise OSError.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        """ValueError: something else lies at `path` or beside it, or a recorder works there."""
        self.path = path
        self._most = max_bytes // 2
        for file in (rotated(path), path):
            _check_ours(file)
        self._fd = _open(path)
        try:
            os.ftruncate(self._fd, _whole_lines(self._fd))
            self.size = os.fstat(self._fd).st_size
            if self.size > self._most:
                os.ftruncate(self._fd, 0)
                self.size = 0
            _drop_above(rotated(path), self._most)
        except BaseException:
            self.close()
            raise

    def fits(self, num_bytes: int) -> bool:
        return self.size + num_bytes <= self._most

    def could_fit(self, num_bytes: int) -> bool:
        """Whether an empty file has room for so much."""
        return num_bytes <= self._most

    def append(self, lines: bytes) -> None:
        """Lines that fit. After an error the file may end in part of one."""
        while lines:
            written = os.write(self._fd, lines)
            self.size += written
            lines = lines[written:]

    def rotate(self) -> None:
        """Go on in an empty file; what is there replaces the one that was moved aside before."""
        os.replace(self.path, rotated(self.path))
        self.close()
        self._fd = _open(self.path)
        self.size = 0

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def _open(path: Path) -> int:
    """A descriptor that appends, and has the file to itself while it is open."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise ValueError(
            f"{path} is being recorded to by another store, give each its own"
        ) from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_ours(path: Path) -> None:
    try:
        with path.open("rb") as file:
            start = file.read(_STEP)
    except FileNotFoundError:
        return
    # Part of a header is what a crash while it was written leaves.
    mark = json.dumps({"format": FORMAT}).encode()[:-1]
    if not start.startswith(mark) and not mark.startswith(start):
        raise ValueError(f"{path} is there already and is no recorded trace; it was left untouched")


def _whole_lines(fd: int) -> int:
    """Bytes up to the last line's end: after a crash the file may hold part of one more."""
    end = os.fstat(fd).st_size
    while end:
        start = max(0, end - _STEP)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _drop_above(path: Path, most: int) -> None:
    """A limit that was lowered holds for what was recorded under the old one, too."""
    try:
        if path.stat().st_size > most:
            path.unlink()
    except FileNotFoundError:
        pass
