"""A small world for tests of the IO side: chunks whose bytes follow from their key, chunk files
made behind a backend's back, and a backend that is asked and waited for."""

import hashlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import xxhash

from ..arena import SharedArena
from ..chunk_file import chunk_path, file_bytes, pack_header
from ..codec import PlaneCodec
from ..recover import open_directory
from .base import (
    NO_PARENT,
    ChunkMeta,
    Codec,
    Completion,
    DeleteJob,
    FileRef,
    IoBackend,
    Job,
    ReadJob,
    WriteJob,
    no_pause,
)
from .process import ProcessBackend
from .threads import ThreadBackend

SLOT_BYTES = 16384
ITEMSIZE = 2
NAMESPACE = hashlib.sha256(b"a namespace").digest()
PATIENCE_S = 30.0

Kind = Literal["process", "threads"]


def key_of(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def meta_of(
    number: int,
    parent: int | None = None,
    *,
    namespace: bytes = NAMESPACE,
    generation: int = 1,
    payload_bytes: int = SLOT_BYTES,
    codec: Codec = Codec.RAW,
) -> ChunkMeta:
    """Of the chunk with this number; parent is another one's number."""
    return ChunkMeta(
        namespace=namespace,
        generation=generation,
        key=key_of(number),
        parent=NO_PARENT if parent is None else key_of(parent),
        num_tokens=256,
        payload_bytes=payload_bytes,
        stored_bytes=payload_bytes,
        codec=codec,
    )


def content_of(meta: ChunkMeta) -> bytes:
    """The chunk's payload: bytes that no other chunk has; half of them compress well."""
    noise = hashlib.shake_256(meta.key).digest(meta.payload_bytes)
    return bytes(byte if at % ITEMSIZE == 0 else 63 for at, byte in enumerate(noise))


def file_of(meta: ChunkMeta) -> FileRef:
    size_bytes = file_bytes(meta.stored_bytes, meta.codec)
    return FileRef(meta.namespace, meta.generation, meta.key, size_bytes)


def make_file(root: Path, meta: ChunkMeta) -> Path:
    """A chunk file as the IO side would have left it, and where it lies."""
    path = Path(chunk_path(str(root), meta))
    path.parent.mkdir(parents=True, exist_ok=True)
    stored = content_of(meta)
    if meta.codec is not Codec.RAW:
        stored = PlaneCodec(ITEMSIZE).encode(memoryview(stored))
        assert len(stored) == meta.stored_bytes, "meta must say what encoding makes of it"
    header = pack_header(meta, xxhash.xxh3_128_digest(stored))
    path.write_bytes((header + stored).ljust(file_bytes(len(stored), meta.codec), b"\0"))
    return path


def open_files() -> set[str]:
    """What every descriptor of this process stands for, by number and target."""
    found: set[str] = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
        except FileNotFoundError:
            continue  # the listing's own
    return found


class IoWorld:
    """A recovered directory, an arena and a backend.

    hold: the pause point at which the process stops, if any. pause: what the threads call at each.
    """

    def __init__(
        self,
        root: Path,
        kind: Kind,
        *,
        lanes: int = 2,
        num_slots: int = 8,
        hold: str = "",
        pause: Callable[[str], None] = no_pause,
    ) -> None:
        self.root = root
        self.recovered = open_directory(root)
        self.arena = SharedArena(SLOT_BYTES, num_slots)
        self.backend: IoBackend
        if kind == "threads":
            self.backend = ThreadBackend(
                root, self.arena, lanes=lanes, itemsize=ITEMSIZE, pause=pause
            )
        else:
            lock_fd = self.recovered.lock.fd
            self.backend = ProcessBackend(
                root, self.arena, lanes=lanes, itemsize=ITEMSIZE, lock_fd=lock_fd, hold=hold
            )
        self.next_id = 0

    def found(self) -> set[bytes]:
        """Keys of the chunks that were there when the directory was opened."""
        return {row.key for row in self.recovered.entries}

    def folder(self, meta: ChunkMeta) -> Path:
        """The namespace's folder, made if need be, as the caller of a backend must."""
        folder = Path(chunk_path(str(self.root), meta)).parent.parent
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def path(self, meta: ChunkMeta) -> Path:
        """Where the chunk's file lies, or would lie."""
        return Path(chunk_path(str(self.root), meta))

    def write(self, meta: ChunkMeta, slot: int = 0, victims: Iterable[FileRef] = ()) -> Completion:
        self.folder(meta)
        self.fill(meta, slot)
        return self.run(WriteJob(self.new_id(), meta, slot, tuple(victims)))[0]

    def read(self, meta: ChunkMeta, slot: int = 1) -> Completion:
        self.arena.slot(slot)[:] = bytes(SLOT_BYTES)
        return self.run(ReadJob(self.new_id(), meta, slot))[0]

    def delete(self, *files: FileRef) -> Completion:
        return self.run(DeleteJob(self.new_id(), files))[0]

    def fill(self, meta: ChunkMeta, slot: int) -> None:
        """Put the chunk's payload into a slot, and junk behind it."""
        self.arena.slot(slot)[:] = content_of(meta).ljust(SLOT_BYTES, b"!")

    def holds(self, meta: ChunkMeta, slot: int = 1) -> bool:
        """Whether the slot has the chunk's payload."""
        return self.arena.slot(slot)[: meta.payload_bytes] == content_of(meta)

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id

    def run(self, *jobs: Job) -> list[Completion]:
        """Submit and wait; the completions are in the order of the jobs."""
        self.backend.submit(jobs)
        done = {completion.job_id: completion for completion in self.take(len(jobs))}
        return [done[job.job_id] for job in jobs]

    def take(self, number: int) -> list[Completion]:
        """Wait for exactly that many completions."""
        done: list[Completion] = []
        deadline_s = time.monotonic() + PATIENCE_S
        while len(done) < number:
            assert time.monotonic() < deadline_s, f"{number - len(done)} jobs do not come back"
            self.backend.wait(0.05)
            done += self.backend.poll()
        assert len(done) == number
        return done

    def temporaries(self) -> list[str]:
        return os.listdir(self.root / "tmp")

    def close(self) -> None:
        self.backend.close()
        self.arena.close()
        self.recovered.lock.close()
