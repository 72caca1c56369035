"""Loads from chunk files straight into buffers on the device, where they are verified.

    reader    file -> row *
    caller                '-> a poll finds it read             *-> ... and verified: a slot
    stream                     '-> header, digest to the host *'

A row holds a whole file: its header says what the digest of the rest must be. From verified rows
a Transfer takes chunks to pages, as it does from slots in DRAM.
"""

import logging
import time
from collections.abc import Sequence
from concurrent import futures
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from ..kernels.xxh3 import DIGEST_BYTES, xxh3_128
from .base import ChunkFile, DirectLoad, Key
from .chunk_file import HEADER_BYTES, file_bytes, matching_digest
from .device import Device, Event
from .io.base import Codec, Status
from .store import TieredStore

_log = logging.getLogger(__name__)


class Reader(Protocol):
    def read(self, path: str, target: torch.Tensor) -> futures.Future[int]:
        """Begin to fill `target`, device memory, from the start of a file; how many bytes came.
        Never blocks or raises: what fails is the future. `target` is the reader's until then."""
        ...

    def close(self) -> None:
        """Wait until no target is written to any more. Idempotent."""


@dataclass(slots=True, eq=False, repr=False)
class _Row:
    staged: torch.Tensor
    """A chunk file, on the device."""
    seen: torch.Tensor
    """Its header and the digest of what it stores, in main memory."""
    used: Event
    """After all that the stream was given to do with either."""
    read: futures.Future[int]
    """What the reader was last asked to put there."""

    @property
    def free(self) -> bool:
        return self.read.done() and self.used.query()

    def stored(self, file: ChunkFile) -> torch.Tensor:
        return self.staged[HEADER_BYTES:][: file.meta.stored_bytes]

    def see(self, file: ChunkFile) -> None:
        """What the host needs to verify it."""
        self.seen[:HEADER_BYTES].copy_(self.staged[:HEADER_BYTES], non_blocking=True)
        self.seen[HEADER_BYTES:].copy_(xxh3_128(self.stored(file)[None])[0], non_blocking=True)

    def holds(self, file: ChunkFile) -> bool:
        """Whether what the host saw is that chunk, whole."""
        seen = self.seen.numpy().tobytes()
        return matching_digest(seen[:HEADER_BYTES], file.meta) == seen[HEADER_BYTES:]


@dataclass(slots=True, eq=False, repr=False)
class DirectRead:
    """A run of chunks on its way into rows, which are lent until complete()."""

    load: DirectLoad
    rows: list[_Row]
    deadline_s: float
    num_chunks: int = 0
    """Leading chunks of the run that are verified."""
    checking: bool = False
    """Whether the stream was given the next one to check."""
    ready: bool = False
    """Whether num_chunks is final."""
    status: Status = Status.OK
    """How the chunk after those ended."""

    def end(self, status: Status) -> None:
        self.status, self.ready = status, True


class DirectLoads:
    """For the store's thread; nothing waits but wait() and close().

    Owns the reader, a stream and num_rows buffers on the device, of a chunk file each. Close it
    before the store; with the store closed nothing more is served.
    """

    def __init__(
        self, store: TieredStore, device: Device, reader: Reader, *, num_rows: int, timeout_s: float
    ) -> None:
        self._store = store
        self._reader = reader
        self._timeout_s = timeout_s
        self._usable = True
        self._stream = device.stream(urgent=True)
        row_bytes = file_bytes(store.layout.chunk_bytes, Codec.RAW)
        staged = self._stream.empty(num_rows * row_bytes).view(num_rows, row_bytes)
        on_host = (num_rows, HEADER_BYTES + DIGEST_BYTES)
        # Into memory that is not pinned, a copy would block the host.
        seen = torch.zeros(on_host, dtype=torch.uint8, pin_memory=staged.is_cuda)
        # Reader waits for the stream: what had this memory before may still be under way.
        used, nothing = self._stream.record(), futures.Future[int]()
        nothing.set_result(0)
        self._rows = [_Row(*row, used, nothing) for row in zip(staged, seen, strict=True)]
        """Lent to nobody; not free where one was given back before it was read."""
        self._open: list[DirectRead] = []

    def begin(self, keys: Sequence[Key], start: int = 0) -> DirectRead | None:
        """Begin to read what store.prepare_direct() lends, as far as rows are free. None where it
        lends nothing, where no row is free, and once reading was found not to work."""
        rows = [row for row in self._rows if row.free] if self._usable else []
        load = self._store.prepare_direct(keys, start, len(rows)) if rows else None
        if load is None:
            return None
        read = DirectRead(load, rows[: len(load.files)], time.monotonic() + self._timeout_s)
        for row, file in zip(read.rows, load.files, strict=True):
            self._rows.remove(row)
            row.read = self._reader.read(file.path, row.staged[: _size_bytes(file)])
        self._open.append(read)
        return read

    def poll(self) -> None:
        """Go on with what was read, and end what is late or no longer served."""
        for read in self._open:
            if read.load.stop == read.load.start:
                read.ready = True
            while not read.ready and self._advance(read):
                pass
            if not read.ready and time.monotonic() > read.deadline_s:
                read.end(Status.UNAVAILABLE)

    def wait(self, read: DirectRead) -> None:
        """Block until it is ready, at most until its deadline."""
        self.poll()
        while not read.ready:
            row = read.rows[read.num_chunks]
            if read.checking:
                row.used.synchronize()
            else:
                futures.wait([row.read], max(0.0, read.deadline_s - time.monotonic()))
            self.poll()

    def views(self, read: DirectRead) -> list[torch.Tensor]:
        """The bytes of each verified chunk, keys[read.load.start:] in order, as in a slot; on the
        device, to be read only, by what is launched from now on; valid until complete()."""
        if not read.ready:
            raise ValueError("the read is under way: poll() until it is ready")
        load = read.load
        served = load.files[: min(read.num_chunks, load.stop - load.start)]
        return [row.stored(file) for row, file in zip(read.rows, served, strict=False)]

    def complete(self, read: DirectRead, used: bool = True) -> None:
        """Nothing reads the views any more. used: whether anything did."""
        if read not in self._open:
            raise ValueError("complete was called twice for one read")
        self._open.remove(read)
        self._rows += read.rows
        if not read.load.done:  # which the store says of all when it is closed
            self._store.complete_direct(read.load, read.num_chunks, read.status, used=used)

    def close(self) -> None:
        """Complete what is open, unused, and release the buffers once nothing is written to them.
        Idempotent."""
        self._usable = False
        for read in list(self._open):
            self.complete(read, used=False)
        self._reader.close()
        self._stream.record().synchronize()
        self._rows.clear()

    def _advance(self, read: DirectRead) -> bool:
        """One step with the first chunk that is not verified; False while that has to wait."""
        row, file = read.rows[read.num_chunks], read.load.files[read.num_chunks]
        if not (row.used.query() if read.checking else row.read.done()):
            return False
        if read.checking:
            status = Status.OK if row.holds(file) else Status.CORRUPT
            read.num_chunks += status is Status.OK
        else:
            status = self._check(row, file)
        read.checking = not read.checking
        if status is not Status.OK or read.num_chunks == len(read.rows):
            read.end(status)
        return True

    def _check(self, row: _Row, file: ChunkFile) -> Status:
        """How reading it ended; if that is OK, the host will see what it needs to verify it."""
        try:
            if row.read.result() != _size_bytes(file):
                return Status.CORRUPT
            self._stream.run(partial(row.see, file))
        except FileNotFoundError:
            return Status.MISSING
        except Exception:
            # Of the way, not of the chunk: from now on all go through DRAM, and are judged there.
            if self._usable:
                _log.exception("reading straight into device memory fails, and is given up")
            self._usable = False
            return Status.UNAVAILABLE
        finally:
            # If the launch failed, too: what was launched by then uses the row all the same.
            row.used = self._stream.record()
        return Status.OK


def _size_bytes(file: ChunkFile) -> int:
    return file_bytes(file.meta.stored_bytes, file.meta.codec)
