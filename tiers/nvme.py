"""The NVMe tier: which chunk files there are, which are on their way in or out, and what the IO
side was asked to do about it.

All of it is on the engine's thread and in memory. The IO side does the work and reports through
poll().
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from ..admission.base import Chain, EvictionOrder, Key, Tier
from .account import DiskAccount
from .base import ChunkFile
from .chunk_file import CHUNKS, TRANSIENT, chunk_path, file_bytes, folder_name
from .dram import ChunkState, DramChunk, DramTier
from .dropped import DroppedFolders
from .events import EventLog
from .history import WhyNot
from .io.base import (
    NO_PARENT,
    ChunkMeta,
    Codec,
    Completion,
    FileRef,
    IoBackend,
    ReadJob,
    ReclaimJob,
    Status,
    TouchJob,
    WriteJob,
)
from .ledger import Ledger
from .recover import Recovered
from .shelf import Shelf

TOUCHES_PER_JOB = 4096
_log = logging.getLogger(__name__)


class Planned(Enum):
    YES = "yes"
    LATER = "later"
    """Room, or the file's name, comes free when jobs under way are done."""
    NO = "no"


@dataclass(frozen=True, slots=True)
class ReadDone:
    """The read into `slot` ended; with OK the chunk there is verified."""

    slot: int
    status: Status


@dataclass(frozen=True, slots=True)
class WriteDone:
    """The write from `slot` ended; the slot's bytes are no longer needed for it."""

    slot: int
    ok: bool


class NvmeTier:
    """Plans jobs for the IO side and applies what it reports. Tells DRAM what is no longer backed,
    and never evicts a chunk from which chunks in DRAM hang."""

    present = True

    def __init__(
        self,
        root: Path,
        recovered: Recovered,
        io: IoBackend,
        dram: DramTier,
        why_not: WhyNot,
        events: EventLog,
        *,
        budget_bytes: int,
        namespace: bytes,
        codec: Codec,
        order: EvictionOrder,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.bytes_written = 0
        self.corrupt_chunks = 0
        self.direct_chunks = 0
        """Served to whoever read their files."""
        self._io = io
        self._root = str(root)
        self._namespace = namespace
        self._codec = codec
        self._dram = dram
        self._why_not = why_not
        self._events = events
        self._ledger = Ledger(io)
        self._dropped = DroppedFolders(root, dict(recovered.dropped), self._ledger)
        self._account = DiskAccount(
            budget_bytes, self._ledger, self._dropped, order, self._busy, self._evicted
        )
        self._reading: dict[Key, int] = {}
        self._num_lent = 0
        self._first_job_id = 0  # of this generation
        self._generations = recovered.generations
        self._generation = recovered.generations.get(namespace) or time.time_ns()
        self._take_in(recovered)
        (root / CHUNKS / self._folder).mkdir(mode=0o700, exist_ok=True)
        self._account.trim()
        self._ledger.submit()

    # What is here ----------------------------------------------------------------------------

    def holds(self, key: Key) -> bool:
        """Whether the chunk can be read from disk."""
        row = self._own.table.row(key)
        return row is not None and not self._own.table.writing[row]

    def expects(self, key: Key) -> bool:
        """Whether the chunk is on disk or being written."""
        return key in self._own.table

    def readable_keys(self) -> Iterator[Key]:
        """Of the chunks that can be read from disk."""
        return filter(self.holds, self._own.table)

    def describe(self, key: Key) -> tuple[int, Key | None]:
        """(number of tokens, parent) of a chunk that is here."""
        row = self._own.table.row(key)
        assert row is not None
        return self._own.table.num_tokens(row), self._own.table.parent(row)

    def file(self, key: Key) -> ChunkFile:
        """Of a chunk that can be read from disk."""
        meta = self._own.table.meta(key)
        return ChunkFile(chunk_path(self._root, meta), meta)

    def touch(self, chain: Chain, stop: int, *, hits: int) -> None:
        """A request used chain[:stop]; `hits` of 1 counts as a hit on each."""
        self._own.touch(chain, stop, hits)

    @property
    def used_bytes(self) -> int:
        """Bytes on disk, counting what jobs under way may still hold."""
        return self._account.used_bytes

    @property
    def free_bytes(self) -> int:
        return max(0, self.budget_bytes - self.used_bytes)

    def __len__(self) -> int:
        """Chunks of this namespace, on disk or being written."""
        return len(self._own.table)

    @property
    def jobs_in_flight(self) -> int:
        return self._ledger.in_flight

    @property
    def io_alive(self) -> bool:
        return self._io.alive

    def stats(self) -> dict[str, Any]:
        return {
            "chunks": len(self),
            "resident_bytes": self._account.resident_bytes,
            "used_bytes": self.used_bytes,
            "budget_bytes": self.budget_bytes,
            "free_bytes": self.free_bytes,
            "bytes_written": self.bytes_written,
            "corrupt_chunks": self.corrupt_chunks,
            "direct_chunks": self.direct_chunks,
            "jobs_in_flight": self.jobs_in_flight,
            "reads_in_flight": self._ledger.count(ReadJob),
            "writes_in_flight": self._ledger.count(WriteJob),
            "io_alive": self._io.alive,
            "io_restarts": self._io.restarts,
        }

    # Jobs ------------------------------------------------------------------------------------

    def plan_read(self, key: Key, slot: int) -> bool:
        """Read a chunk that is here into `slot`; False when too much is under way already."""
        if not self.holds(key) or not self._ledger.has_room:
            return False
        self._reading[key] = self._reading.get(key, 0) + 1
        self._ledger.queue(lambda job_id: ReadJob(job_id, self._own.table.meta(key), slot))
        return True

    def plan_write(
        self, chunk: DramChunk, payload_bytes: int, worth: float | None = None
    ) -> Planned:
        """Write a chunk from its slot, evicting to make room, with a worth only what is worth
        less. Its parent must be expected here."""
        changing = self._ledger.is_changing(self._generation, chunk.key)
        if changing or not self._ledger.has_room:
            return Planned.LATER
        meta = ChunkMeta(
            namespace=self._namespace,
            generation=self._generation,
            key=chunk.key,
            parent=chunk.parent or NO_PARENT,
            num_tokens=chunk.num_tokens,
            payload_bytes=payload_bytes,
            stored_bytes=payload_bytes,
            codec=self._codec,
        )
        need_bytes = file_bytes(payload_bytes, Codec.RAW)
        self._own.expect(meta, need_bytes)
        victims = self._account.make_room(need_bytes, worth)
        if victims is None:
            self._own.discard(chunk.key)
            return Planned.LATER if self._account.room_may_come else Planned.NO
        charge = max(need_bytes, sum(victim.file_bytes for victim in victims))
        self._ledger.queue(
            lambda job_id: WriteJob(job_id, meta, chunk.slot, tuple(victims)), charge
        )
        return Planned.YES

    def lend(self, file: ChunkFile) -> None:
        """Somebody else reads the file of a chunk that is here: it stays until give_back()."""
        key = file.meta.key
        self._reading[key] = self._reading.get(key, 0) + 1
        self._num_lent += 1

    def give_back(self, file: ChunkFile, status: Status) -> None:
        """They are done with it; status says how that ended, as of a read of our own."""
        self._num_lent -= 1
        self._judge(file.meta, status)

    @contextmanager
    def kept(self, keys: Sequence[Key]) -> Iterator[None]:
        """Chunks that are about to be read, or hung from, stay whatever is evicted in the block."""
        for key in keys:
            self._reading[key] = self._reading.get(key, 0) + 1
        try:
            yield
        finally:
            for key in keys:
                self._is_read(key)

    def submit(self) -> None:
        """Hand everything planned to the IO side, in one call."""
        self._ledger.submit()

    def poll(self) -> list[ReadDone | WriteDone]:
        """Apply what the IO side reported, and say what it means for the slots."""
        events: list[ReadDone | WriteDone] = []
        for job, done, released_bytes in self._ledger.poll():
            if job.job_id < self._first_job_id:
                self._dropped.hold(released_bytes)
            match job:
                case ReadJob():
                    events.append(self._read_done(job, done))
                case WriteJob():
                    events.append(self._write_done(job, done))
                case ReclaimJob():
                    self._dropped.apply(job, done)
                case _:
                    pass
        if self._own.num_touched >= TOUCHES_PER_JOB:
            self._record_touches()
        self._ledger.submit()
        return events

    def wait(self, timeout_s: float) -> None:
        self._io.wait(timeout_s)

    # Going -----------------------------------------------------------------------------------

    def drop(self, key: Key, why: str) -> None:
        """Forget a chunk and all below it, now; their files follow."""
        files: list[FileRef] = []
        for gone in [key, *self._own.order.descendants(key)]:
            if gone in self._own.table:
                file = self._own.table.file(gone)
                if not self._own.discard(gone):  # one being written is deleted when that is done
                    files.append(file)
                    self._events.removed(Tier.NVME, gone)
                self._lost(gone, why)
        self._ledger.delete(files)

    def invalidate(self, order: EvictionOrder, successor: bytes) -> None:
        """Make every chunk of this namespace unreachable, for good: also after a crash.

        What comes from now on is of the namespace `successor`, maybe the same; of another, it is
        dropped at the next opening. Raises TierError when the disk refuses to remember it; nothing
        is served all the same.
        """
        name, size_bytes = self._folder, self._own.resident_bytes
        for key in self.readable_keys() if self._events.on else ():
            self._events.removed(Tier.NVME, key)
        self._account.own = Shelf(order)
        newest = max(self._generation, self._generations.get(successor, 0))
        transient = TRANSIENT if successor != self._namespace else 0
        self._namespace, self._generation = successor, max(time.time_ns(), newest + 1) | transient
        self._first_job_id = self._ledger.next_job_id
        self._dropped.drop(name, size_bytes, self._folder)
        self._ledger.submit()

    def close(self) -> None:
        self._record_touches()
        self._ledger.submit()
        self._io.close()

    def check_integrity(self) -> None:
        self._account.check_integrity()
        assert sum(self._reading.values()) == self._ledger.count(ReadJob) + self._num_lent

    def _busy(self, key: Key) -> bool:
        return key in self._reading or self._dram.anchors(key)

    def _evicted(self, key: Key) -> None:
        self._events.removed(Tier.NVME, key)
        if not self._dram.unback(key, ChunkState.UNBACKED):  # worth least there a moment ago
            self._why_not.evicted(key, Tier.NVME)
            self._dram.detach_below(key)

    def _lost(self, key: Key, why: str) -> None:
        """Unless DRAM has it, `key` is nowhere now, and nothing may hang from it."""
        if not self._dram.unback(key, self._dram.unwritten):
            self._why_not.record([key], why)
            self._dram.detach_below(key)

    # Applying --------------------------------------------------------------------------------

    def _read_done(self, job: ReadJob, done: Completion) -> ReadDone:
        self._judge(job.meta, done.status)
        return ReadDone(job.slot, done.status)

    def _judge(self, meta: ChunkMeta, status: Status) -> None:
        """A read of the chunk's file ended so."""
        self._is_read(meta.key)
        if status not in (Status.OK, Status.UNAVAILABLE):
            self.corrupt_chunks += 1
            _log.warning("chunk %s on disk is bad (%s): dropped", meta.key.hex(), status.name)
            if meta.generation == self._generation:
                self.drop(meta.key, f"{status.name.lower()} on disk")

    def _is_read(self, key: Key) -> None:
        self._reading[key] -= 1
        if not self._reading[key]:
            del self._reading[key]

    def _write_done(self, job: WriteJob, done: Completion) -> WriteDone:
        key = job.meta.key
        current = job.meta.generation == self._generation
        row = self._own.table.row(key) if current else None
        if done.status is Status.OK:
            self.bytes_written += done.file_bytes
            if row is not None:
                self._own.table.written(row, done.codec, done.stored_bytes, done.file_bytes)
                self._own.resident_bytes += done.file_bytes
                self._events.stored(Tier.NVME, key)
            elif current:  # dropped while it was written
                meta = job.meta
                file = FileRef(meta.namespace, meta.generation, key, done.file_bytes)
                self._ledger.delete([file])
        elif row is not None:
            self.drop(key, "could not be written")
        return WriteDone(job.slot, done.status is Status.OK and row is not None)

    def _record_touches(self) -> None:
        touched = self._own.take_touched()
        for start in range(0, len(touched), TOUCHES_PER_JOB):
            self._ledger.queue(partial(TouchJob, entries=tuple(touched[start:][:TOUCHES_PER_JOB])))

    def _take_in(self, recovered: Recovered) -> None:
        """Oldest use first. Where other namespaces have a key in common, the later one stays."""
        surplus: list[FileRef] = []
        for row in recovered.entries:
            own = row.namespace == self._namespace
            shelf = self._account.own if own else self._account.foreign
            if row.key in shelf.table:
                surplus.append(shelf.take(row.key))
            shelf.put(row.meta, row.file_bytes, row.last_use_s, row.hits)
        self._ledger.delete(surplus)

    @property
    def _own(self) -> Shelf:
        return self._account.own

    @property
    def _folder(self) -> str:
        return folder_name(self._namespace, self._generation)
