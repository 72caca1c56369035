"""Traces from files: which format it is shows in what they hold, never in their names."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from reprlib import repr as short_repr
from typing import BinaryIO, Protocol

from ...tiers.trace_file import FORMAT, rotated
from .bailian import Bailian
from .fields import Record
from .kv_cache_tester import KvCacheTester
from .mooncake import Mooncake
from .recorded import Recorded
from .trace import Trace

Progress = Callable[[int, int], None]
"""Told bytes read and bytes in all; of a compressed file, as they lie on disk."""

FORMATS = (
    "What is read: JSON lines, plain or .gz, of Mooncake, Qwen-Bailian, kv-cache-tester, or"
    " recorded by a store with trace_path"
)

_REPORT_LINES = 256
_PEEK = 1 << 12
_BROKEN = (ValueError, TypeError, KeyError, OverflowError, RecursionError)
"""What taking a record may raise when it is not as its format says."""


class Reader(Protocol):
    """Takes a format's records one by one; a bad one raises what is in _BROKEN."""

    def __init__(self, first: Record, seed: int) -> None: ...

    @staticmethod
    def reads(record: Record) -> bool:
        """Whether a trace that begins with this record is of this format."""
        ...

    def add(self, record: Record) -> None: ...

    def trace(self, name: str) -> Trace: ...


_decode = json.JSONDecoder().decode

READERS: tuple[type[Reader], ...] = (Recorded, KvCacheTester, Bailian, Mooncake)
"""The first that reads it has it: Bailian's records have all that Mooncake's have."""


def no_progress(done: int, total: int) -> None:
    """Told of progress, does nothing."""


def load_trace(path: str | Path, *, seed: int = 0, progress: Progress = no_progress) -> Trace:
    """The trace in a file, plain or .gz, with requests in order of arrival.

    A recording that was moved aside is loaded from `path`.1 and `path` as one trace; so is a
    directory if all its files are kv-cache-tester sessions. seed: for what a format does not say
    and is drawn; the trace's notes say what that is.
    ValueError: a line is broken (file, line and fault are named), or there is no trace here that
    says which prompts begin alike. OSError: a file cannot be read.
    """
    path = Path(path)
    alone = not path.is_dir()
    lines = _Lines(_files(path), progress)
    reader: Reader | None = None
    for line in lines:
        try:
            reader = _take(reader, line, seed, alone=alone)
        except _BROKEN as error:
            raise ValueError(f"{lines.place}: {_fault(error)}") from error
    trace = reader.trace(path.name) if reader else None
    if trace is None or not trace.num_requests:
        raise ValueError(f"{path} holds no request")
    return trace


class _Lines:
    """The lines of files that are not blank, one file after the other."""

    def __init__(self, files: list[Path], progress: Progress) -> None:
        self._files = files
        self._progress = progress
        self._file, self._number = Path(), 0

    @property
    def place(self) -> str:
        """Of the last line."""
        return f"{self._file}, line {self._number}"

    def __iter__(self) -> Iterator[bytes]:
        sizes = [file.stat().st_size for file in self._files]
        for i, file in enumerate(self._files):
            self._file = file
            with file.open("rb") as raw:
                for number, line in enumerate(_text(raw, file), 1):
                    self._number = number
                    if number % _REPORT_LINES == 0:
                        self._progress(min(sum(sizes[:i]) + raw.tell(), sum(sizes)), sum(sizes))
                    if not line.isspace():
                        yield line
        self._progress(sum(sizes), sum(sizes))


def _take(reader: Reader | None, line: bytes, seed: int, *, alone: bool) -> Reader:
    if isinstance(reader, Recorded) and not line.endswith(b"\n"):
        reader.skip_torn()
        return reader
    record = _record(line) if reader else _first_record(line)
    reader = reader or _reader(record, seed)
    if not alone and not (isinstance(reader, KvCacheTester) and reader.reads(record)):
        raise ValueError("a directory is one trace only if it is all kv-cache-tester sessions")
    reader.add(record)
    return reader


def _reader(record: Record, seed: int) -> Reader:
    for kind in READERS:
        if kind.reads(record):
            return kind(record, seed)
    fields = ", ".join(map(short_repr, list(record)[:8]))
    raise ValueError(f"a record of {fields} does not say which prompts begin alike. {FORMATS}")


def _first_record(line: bytes) -> Record:
    """Says what is wrong with other kinds of files before it says that they are not JSON."""
    if b"ContextTokens" in line[:_PEEK]:
        raise ValueError(
            "Azure's LLM inference traces hold arrivals and lengths only: they do not say which"
            f" prompts begin alike. {FORMATS}"
        )
    if line.lstrip()[:1] != b"{":
        raise ValueError(f"it does not begin with a JSON object on one line. {FORMATS}")
    return _record(line)


def _record(line: bytes) -> Record:
    record = _decode(line.decode())
    if not isinstance(record, dict):
        raise ValueError("it is no JSON object")
    return record


def _fault(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"it is no JSON object on one line ({error})"
    if isinstance(error, KeyError):
        return f"{error.args[0]} is missing"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error)


def _text(raw: BinaryIO, path: Path) -> Iterator[bytes]:
    """Lines of a file, unpacked if it is compressed. A file of anything else may have no lines, so
    what is read of it ends where it is sure to be no trace."""
    packed = raw.read(2) == b"\x1f\x8b"
    raw.seek(0)
    with gzip.open(raw) if packed else nullcontext(raw) as file:
        try:
            start = file.read(_PEEK)
            if start.strip()[:1] not in (b"{", b""):
                yield start.partition(b"\n")[0]
            file.seek(0)
            yield from file
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path} is no whole .gz file: {error}") from error


def _files(path: Path) -> list[Path]:
    """In the order of what they recorded."""
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file())
        return [file for file in files if not file.name.startswith(".")]
    before = rotated(path)
    if before.is_file() and (not path.exists() or _is_recording(path)) and _is_recording(before):
        return [before, path] if path.exists() else [before]
    return [path]


def _is_recording(path: Path) -> bool:
    with path.open("rb") as file:
        return FORMAT.encode() in file.readline(_PEEK)
