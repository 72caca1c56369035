"""Completions in shared memory: the worker fills entries in turn, the caller looks at the next one.

    entry = sequence | job id | status | codec | stored | file bytes | leaked | digest of all that

An entry counts only with the sequence number that is due and a digest that fits, so one that is
half written, whatever order the processor shows it in, is not there yet.
"""

import mmap
import os
import struct

import xxhash

from .base import Codec, Completion, Status

_BODY = struct.Struct("<QQBB6xQQQ")
_DIGEST = struct.Struct("<Q")
_SEQUENCE = struct.Struct("<Q")
_ENTRY_BYTES = 64


def ring_bytes(capacity: int) -> int:
    return capacity * _ENTRY_BYTES


class _Ring:
    def __init__(self, fd: int, capacity: int) -> None:
        self._map = mmap.mmap(fd, ring_bytes(capacity))
        self._capacity = capacity
        self._next = 1  # fresh memory is zeros, and must not look like an entry

    def close(self) -> None:
        self._map.close()

    @property
    def _offset(self) -> int:
        return self._next % self._capacity * _ENTRY_BYTES


class RingWriter(_Ring):
    """For one thread at a time. Jobs in flight never exceed capacity, so no entry is overrun."""

    def put(self, done: Completion) -> None:
        body = _BODY.pack(
            self._next,
            done.job_id,
            done.status,
            done.codec,
            done.stored_bytes,
            done.file_bytes,
            done.leaked_bytes,
        )
        entry = body + _DIGEST.pack(xxhash.xxh3_64_intdigest(body))
        self._map[self._offset : self._offset + len(entry)] = entry
        self._next += 1


class RingReader(_Ring):
    @property
    def ready(self) -> bool:
        """Whether the next entry has been begun. No system call."""
        return bool(_SEQUENCE.unpack_from(self._map, self._offset)[0] == self._next)

    def take(self) -> list[Completion]:
        """Entries since the last call. No system call."""
        taken: list[Completion] = []
        while self.ready:
            body = self._map[self._offset : self._offset + _BODY.size]
            (digest,) = _DIGEST.unpack_from(self._map, self._offset + _BODY.size)
            if xxhash.xxh3_64_intdigest(body) != digest:
                break
            _, job_id, status, codec, stored, file_bytes, leaked = _BODY.unpack(body)
            done = Completion(job_id, Status(status), Codec(codec), stored, file_bytes, leaked)
            taken.append(done)
            self._next += 1
        return taken


def create_ring(capacity: int) -> int:
    """A descriptor of zeroed shared memory for a ring; the caller's to close."""
    fd = os.memfd_create("rootcellar-ring")
    os.ftruncate(fd, ring_bytes(capacity))
    return fd
