"""Jobs as bytes, for the way to the worker process. Nothing is pickled.

message = total length (4 bytes) | kind (1 byte) | body
"""

import struct
from collections.abc import Iterable, Iterator

from .base import (
    ChunkMeta,
    Codec,
    DeleteJob,
    FileRef,
    Job,
    ReadJob,
    ReclaimJob,
    TouchJob,
    WriteJob,
)

_HEAD = struct.Struct("<IB")
_META = struct.Struct("<32sQ32s32sIQQB")
_FILE = struct.Struct("<32sQ32sQ")
_USE = struct.Struct("<32sdI")
_ID_SLOT = struct.Struct("<QI")
_ID = struct.Struct("<Q")
_READ, _WRITE, _DELETE, _RECLAIM, _TOUCH, _CLOSE = range(6)

CLOSE = _HEAD.pack(_HEAD.size, _CLOSE)
"""The last message: finish what came before, then end."""


def pack(jobs: Iterable[Job]) -> bytes:
    return b"".join(_message(*_body(job)) for job in jobs)


class Unpacker:
    """Puts messages together from pieces of any length."""

    def __init__(self) -> None:
        self._pieces = bytearray()
        self.closing = False
        """Whether CLOSE came."""

    def feed(self, piece: bytes) -> list[Job]:
        """The jobs that are complete now, in order."""
        self._pieces += piece
        jobs: list[Job] = []
        start = 0
        while len(self._pieces) - start >= _HEAD.size:
            length, kind = _HEAD.unpack_from(self._pieces, start)
            if len(self._pieces) - start < length:
                break
            if kind == _CLOSE:
                self.closing = True
            else:
                jobs.append(_job(kind, bytes(self._pieces[start + _HEAD.size : start + length])))
            start += length
        del self._pieces[:start]
        return jobs


def _message(kind: int, body: bytes) -> bytes:
    return _HEAD.pack(_HEAD.size + len(body), kind) + body


def _body(job: Job) -> tuple[int, bytes]:
    match job:
        case ReadJob():
            return _READ, _ID_SLOT.pack(job.job_id, job.slot) + _pack_meta(job.meta)
        case WriteJob():
            start = _ID_SLOT.pack(job.job_id, job.slot) + _pack_meta(job.meta)
            return _WRITE, start + _pack_files(job.victims)
        case DeleteJob():
            return _DELETE, _ID.pack(job.job_id) + _pack_files(job.files)
        case ReclaimJob():
            name = job.name.encode("utf-8", "surrogateescape")  # as os.listdir gave it
            return _RECLAIM, _ID_SLOT.pack(job.job_id, job.max_files) + name
        case TouchJob():
            uses = b"".join(_USE.pack(*entry) for entry in job.entries)
            return _TOUCH, _ID.pack(job.job_id) + uses


def _job(kind: int, body: bytes) -> Job:
    if kind == _DELETE:
        return DeleteJob(_ID.unpack_from(body)[0], tuple(_files(body[_ID.size :])))
    if kind == _TOUCH:
        return TouchJob(_ID.unpack_from(body)[0], _uses(body[_ID.size :]))
    job_id, number = _ID_SLOT.unpack_from(body)
    if kind == _RECLAIM:
        return ReclaimJob(job_id, body[_ID_SLOT.size :].decode("utf-8", "surrogateescape"), number)
    meta = _unpack_meta(body)
    if kind == _READ:
        return ReadJob(job_id, meta, number)
    return WriteJob(job_id, meta, number, tuple(_files(body[_ID_SLOT.size + _META.size :])))


def _pack_meta(meta: ChunkMeta) -> bytes:
    return _META.pack(
        meta.namespace,
        meta.generation,
        meta.key,
        meta.parent,
        meta.num_tokens,
        meta.payload_bytes,
        meta.stored_bytes,
        meta.codec,
    )


def _unpack_meta(body: bytes) -> ChunkMeta:
    fields = _META.unpack_from(body, _ID_SLOT.size)
    namespace, generation, key, parent, num_tokens, payload_bytes, stored_bytes, codec = fields
    return ChunkMeta(
        namespace, generation, key, parent, num_tokens, payload_bytes, stored_bytes, Codec(codec)
    )


def _pack_files(files: Iterable[FileRef]) -> bytes:
    return b"".join(
        _FILE.pack(file.namespace, file.generation, file.key, file.file_bytes) for file in files
    )


def _uses(body: bytes) -> tuple[tuple[bytes, float, int], ...]:
    return tuple((key, last_use_s, hits) for key, last_use_s, hits in _USE.iter_unpack(body))


def _files(body: bytes) -> Iterator[FileRef]:
    return (FileRef(*fields) for fields in _FILE.iter_unpack(body))
