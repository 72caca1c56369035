"""One lane: does one job after the other, each with as few system calls as it takes."""

import errno
import itertools
import logging
import mmap
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import xxhash

from ..arena import ArenaMapping
from ..chunk_file import (
    DROPPED,
    HEADER_BYTES,
    TMP,
    chunk_path,
    file_bytes,
    matching_digest,
    pack_header,
    padded_bytes,
    parse_folder,
    parse_name,
)
from ..codec import PlaneCodec
from ..index_writer import IndexWriter
from .base import (
    ChunkMeta,
    Codec,
    Completion,
    DeleteJob,
    FileRef,
    Job,
    ReadJob,
    ReclaimJob,
    Status,
    TouchJob,
    WriteJob,
)

_log = logging.getLogger(__name__)
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Whatever stands in for a chunk file, a pipe say, opening it does not wait."""
_EXHAUSTED = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN))
"""Says nothing about the medium: the same job may go through in a moment."""


class Lane:
    """The tools of one thread; run() must not be entered twice at once.

    name: of this lane's temporaries, unlike any other writer's in this directory.
    pause: called with the name of a point at which a test may hold or kill the process.
    """

    def __init__(
        self,
        root: str,
        arena: ArenaMapping,
        index: IndexWriter,
        *,
        name: str,
        itemsize: int,
        direct: int,
        pause: Callable[[str], None],
    ) -> None:
        self._root = root
        self._arena = arena
        self._index = index
        self._names = (f"{root}/{TMP}/{name}-{number}" for number in itertools.count())
        self._direct = direct  # O_DIRECT or 0
        self._pause = pause
        self._codec = PlaneCodec(itemsize)
        self._header = memoryview(mmap.mmap(-1, HEADER_BYTES))  # page-aligned, as O_DIRECT wants
        self._scratch: memoryview | None = None

    def run(self, job: Job) -> Completion:
        """Never raises: a job without a completion would hold its slot for ever."""
        try:
            match job:
                case ReadJob():
                    return self._read(job)
                case WriteJob():
                    return self._write(job)
                case DeleteJob():
                    return self._delete(job)
                case ReclaimJob():
                    return self._reclaim(job)
                case TouchJob():
                    return self._touch(job)
        except Exception:
            _log.exception("%s failed", type(job).__name__)
            return Completion(job.job_id, Status.FAILED)

    # Reading ---------------------------------------------------------------------------------

    def _read(self, job: ReadJob) -> Completion:
        try:
            status = self._read_slot(job.meta, self._arena.slot(job.slot))
        except (FileNotFoundError, NotADirectoryError):
            status = Status.MISSING
        except OSError as error:
            status = _refusal(error)
        return Completion(job.job_id, status)

    def _read_slot(self, meta: ChunkMeta, slot: memoryview) -> Status:
        size_bytes = padded_bytes(meta.stored_bytes)
        target = slot if meta.codec is Codec.RAW else self._scratch_buffer()
        if size_bytes > len(slot) or meta.payload_bytes > len(slot):
            return Status.CORRUPT
        fd = os.open(chunk_path(self._root, meta), _READ | self._direct)
        try:
            read_bytes = os.preadv(fd, [self._header, target[:size_bytes]], 0)
        finally:
            os.close(fd)
        if read_bytes != HEADER_BYTES + size_bytes:
            return Status.CORRUPT
        return self._verify(meta, target[: meta.stored_bytes], slot)

    def _verify(self, meta: ChunkMeta, stored: memoryview, slot: memoryview) -> Status:
        self._pause("verify")
        digest = matching_digest(self._header, meta)
        if digest is None or xxhash.xxh3_128_digest(stored) != digest:
            return Status.CORRUPT
        if meta.codec is Codec.RAW:
            return Status.OK if meta.stored_bytes == meta.payload_bytes else Status.CORRUPT
        decoded = self._codec.decode(stored, slot[: meta.payload_bytes])
        return Status.OK if decoded else Status.CORRUPT

    # Writing ---------------------------------------------------------------------------------

    def _write(self, job: WriteJob) -> Completion:
        meta, body = self._encoded(job.meta, self._arena.slot(job.slot))
        size_bytes = HEADER_BYTES + len(body)
        temporary = next(self._names)
        recycled, leaked_bytes = self._take_victims(job.victims, size_bytes, temporary)
        try:
            if leaked_bytes:  # what could not go leaves no room for more
                raise OSError(errno.EDQUOT, "victims could not be removed")
            digest = xxhash.xxh3_128_digest(body[: meta.stored_bytes])
            self._header[:] = pack_header(meta, digest)
            self._fill(temporary, body, 0 if recycled else os.O_CREAT | os.O_EXCL)
            self._pause("rename")
            self._place(temporary, chunk_path(self._root, meta))
        except OSError as error:
            leaked_bytes += self._unlink(temporary, size_bytes)[1]
            return Completion(job.job_id, _refusal(error), leaked_bytes=leaked_bytes)
        self._index.put(meta, size_bytes, time.time())
        return Completion(job.job_id, Status.OK, meta.codec, meta.stored_bytes, size_bytes)

    def _encoded(self, meta: ChunkMeta, slot: memoryview) -> tuple[ChunkMeta, memoryview]:
        """What will be stored, and its bytes with zeros up to the size of the file."""
        payload_bytes = meta.payload_bytes
        if payload_bytes > len(slot):
            raise ValueError(f"a payload of {payload_bytes} bytes in a slot of {len(slot)}")
        if meta.codec is not Codec.RAW:
            stored = self._codec.encode(slot[:payload_bytes])
            body_bytes = file_bytes(len(stored), meta.codec) - HEADER_BYTES
            if body_bytes < padded_bytes(payload_bytes):
                scratch = self._scratch_buffer()
                scratch[: len(stored)] = stored
                meta = replace(meta, stored_bytes=len(stored))
                return meta, _zero_padded(scratch, len(stored), body_bytes)
        meta = replace(meta, stored_bytes=payload_bytes, codec=Codec.RAW)
        return meta, _zero_padded(slot, payload_bytes, padded_bytes(payload_bytes))

    def _take_victims(
        self, victims: tuple[FileRef, ...], size_bytes: int, temporary: str
    ) -> tuple[bool, int]:
        """Whether one of them is now `temporary`, to be overwritten, and the bytes that could not
        be removed. The others go first, so that the room on disk is never exceeded."""
        spare = next((file for file in victims if file.file_bytes == size_bytes), None)
        leaked_bytes = sum(self._remove(file)[1] for file in victims if file is not spare)
        if spare is None:
            return False, leaked_bytes
        self._index.delete(spare)
        try:
            os.rename(chunk_path(self._root, spare), temporary)
        except FileNotFoundError:
            return False, leaked_bytes
        except OSError:
            return False, leaked_bytes + spare.file_bytes
        return True, leaked_bytes

    def _fill(self, temporary: str, body: memoryview, create: int) -> None:
        size_bytes = HEADER_BYTES + len(body)
        flags = os.O_WRONLY | os.O_CLOEXEC | self._direct | create
        fd = os.open(temporary, flags, 0o600)
        try:
            self._pause("write")
            if not create and os.fstat(fd).st_size != size_bytes:
                os.ftruncate(fd, size_bytes)  # not the size it was known by
            if os.pwritev(fd, [self._header, body], 0) != size_bytes:
                raise OSError(errno.ENOSPC, "a short write")
        finally:
            os.close(fd)

    def _place(self, temporary: str, path: str) -> None:
        try:
            os.rename(temporary, path)
        except FileNotFoundError:
            # The folder of the key's first digits may be new. The namespace's is never made here:
            # if it is gone, it was dropped, and what was written for it must not come back.
            with suppress(FileExistsError):  # another lane was first
                os.mkdir(os.path.dirname(path), 0o700)
            os.rename(temporary, path)

    # Removing --------------------------------------------------------------------------------

    def _delete(self, job: DeleteJob) -> Completion:
        freed_bytes = leaked_bytes = 0
        for file in job.files:
            freed, leaked = self._remove(file)
            freed_bytes += freed
            leaked_bytes += leaked
        status = Status.FAILED if leaked_bytes else Status.OK
        return Completion(job.job_id, status, file_bytes=freed_bytes, leaked_bytes=leaked_bytes)

    def _reclaim(self, job: ReclaimJob) -> Completion:
        if job.name in ("", ".", "..") or "/" in job.name:
            raise ValueError(f"{job.name!r} is no folder's name")
        freed_bytes, left = 0, job.max_files
        try:
            for parent, _, names in os.walk(f"{self._root}/{DROPPED}/{job.name}", topdown=False):
                for name in names:
                    if not left:
                        return Completion(job.job_id, Status.UNAVAILABLE, file_bytes=freed_bytes)
                    left -= 1
                    freed_bytes += self._reclaim_file(job.name, parent, name)
                os.rmdir(parent)
        except OSError:
            return Completion(job.job_id, Status.FAILED, file_bytes=freed_bytes)
        return Completion(job.job_id, Status.OK, file_bytes=freed_bytes)

    def _reclaim_file(self, folder: str, parent: str, name: str) -> int:
        path = f"{parent}/{name}"
        size_bytes = os.lstat(path).st_size
        parsed, key = parse_folder(folder), parse_name(name)
        if parsed and key:
            self._index.delete(FileRef(*parsed, key, size_bytes))
        os.unlink(path)
        return size_bytes

    def _touch(self, job: TouchJob) -> Completion:
        for key, last_use_s, hits in job.entries:
            self._index.touch(key, last_use_s, hits)
        return Completion(job.job_id, Status.OK)

    def _remove(self, file: FileRef) -> tuple[int, int]:
        """(bytes freed, bytes that could not be); the index forgets the file either way."""
        self._index.delete(file)
        return self._unlink(chunk_path(self._root, file), file.file_bytes)

    @staticmethod
    def _unlink(path: str, size_bytes: int) -> tuple[int, int]:
        try:
            os.unlink(path)
        except (FileNotFoundError, NotADirectoryError):
            return 0, 0
        except OSError:
            return 0, size_bytes
        return size_bytes, 0

    def _scratch_buffer(self) -> memoryview:
        """As long as a slot, and page-aligned too; only compressed chunks need it."""
        if self._scratch is None:
            self._scratch = memoryview(mmap.mmap(-1, self._arena.slot_bytes))
        return self._scratch


def _zero_padded(buffer: memoryview, used_bytes: int, size_bytes: int) -> memoryview:
    buffer[used_bytes:size_bytes] = bytes(size_bytes - used_bytes)
    return buffer[:size_bytes]


def _refusal(error: OSError) -> Status:
    return Status.UNAVAILABLE if error.errno in _EXHAUSTED else Status.FAILED
