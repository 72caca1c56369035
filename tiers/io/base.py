"""Vocabulary of the IO side: jobs go down as lists, completions come back through memory.

The caller's thread owns all metadata. A backend only moves bytes between arena slots and chunk
files, verifies what it read, and reports. See `rootcellar.tiers.chunk_file` for the file itself.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

NO_PARENT = bytes(32)
"""Parent key of a chain's first chunk."""

MAX_IN_FLIGHT = 4096
"""Of both backends."""

CLOSE_TIMEOUT_S = 30.0
"""How long close() lets queued jobs be begun."""


def no_pause(point: str) -> None:
    """A pause point where nothing waits; tests put in something that stops there."""


class Codec(IntEnum):
    RAW = 0
    ZSTD_PLANES = 1


class Status(IntEnum):
    """How a job ended. Everything but OK is a miss or a refusal to the engine, never an error."""

    OK = 0
    CORRUPT = 1
    """Header or checksum wrong, or the file holds another chunk: drop it, never offer it again."""
    MISSING = 2
    """The file is not there: drop it."""
    FAILED = 3
    """The medium refused (full, read-only, EIO). After a read: drop the chunk, as if corrupt."""
    UNAVAILABLE = 4
    """Nothing is known of the medium (IO side died, out of descriptors): a miss, keep the chunk."""


@dataclass(frozen=True, slots=True)
class ChunkMeta:
    """What a chunk file says of itself; a read is OK only if the file agrees in every field.

    namespace, key, parent: 32 bytes each; parent is NO_PARENT for a chain's head.
    generation: which life of the namespace wrote it (u64).
    payload_bytes: bytes of KV in the slot. stored_bytes: bytes in the file after the header and
    before padding (equal to payload_bytes when RAW). checksum is the file's own business.
    """

    namespace: bytes
    generation: int
    key: bytes
    parent: bytes
    num_tokens: int
    payload_bytes: int
    stored_bytes: int
    codec: Codec


@dataclass(frozen=True, slots=True)
class FileRef:
    """A chunk file by name, with the bytes it takes on disk (header, payload and padding)."""

    namespace: bytes
    generation: int
    key: bytes
    file_bytes: int


@dataclass(frozen=True, slots=True)
class ReadJob:
    """Read, verify and decode one chunk into the arena at `slot`; on any failure the slot's bytes
    are undefined."""

    job_id: int
    meta: ChunkMeta
    slot: int


@dataclass(frozen=True, slots=True)
class WriteJob:
    """Write the chunk in `slot`, after removing `victims` (one of equal size is recycled).

    meta.codec is the codec wanted and meta.stored_bytes is ignored: the file may end up RAW when
    compression does not pay; the completion says what was stored. Bytes on disk never exceed what
    they were before the job plus the new file, less the victims, at any moment.
    """

    job_id: int
    meta: ChunkMeta
    slot: int
    victims: tuple[FileRef, ...] = ()


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Remove files and their index entries; a file that is not there counts as removed."""

    job_id: int
    files: tuple[FileRef, ...]


@dataclass(frozen=True, slots=True)
class ReclaimJob:
    """Delete up to `max_files` chunk files of the dropped namespace folder `name` (under dropped/).

    OK when the folder is gone; UNAVAILABLE when files are left (submit again).
    """

    job_id: int
    name: str
    max_files: int = 256


@dataclass(frozen=True, slots=True)
class TouchJob:
    """Record (key, last_use_s since the epoch, hits) in the on-disk index. Reports OK."""

    job_id: int
    entries: tuple[tuple[bytes, float, int], ...]


Job = ReadJob | WriteJob | DeleteJob | ReclaimJob | TouchJob


@dataclass(frozen=True, slots=True)
class Completion:
    """One per job, in any order.

    stored_bytes, codec: of a write that is OK, what was stored.
    file_bytes: bytes the new file takes on disk (write), bytes freed (delete, reclaim).
    leaked_bytes: bytes of victims or files that should be gone but could not be removed.
    """

    job_id: int
    status: Status
    codec: Codec = Codec.RAW
    stored_bytes: int = 0
    file_bytes: int = 0
    leaked_bytes: int = 0


class IoBackend(ABC):
    """Moves bytes on other threads or in another process. For one caller's thread."""

    max_in_flight: int
    """Jobs that may be submitted and not yet polled; the caller keeps below it."""

    @abstractmethod
    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs; never blocks, never raises for a job's own fault. One call per request.

        Reads are served before writes. Two jobs that name the same file must not be in flight
        together. The slot of a read or write belongs to the IO side until its completion.
        """

    @abstractmethod
    def poll(self) -> list[Completion]:
        """Completions since the last call, without a system call while there are none.

        After the IO side died, every job in flight comes back UNAVAILABLE, once it is certain that
        nobody touches its slot any more. The backend then starts again by itself, with back-off.
        """

    @abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Sleep until something may be there to poll, at most timeout_s. For blocking helpers."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """False while jobs would come straight back UNAVAILABLE."""

    @property
    @abstractmethod
    def restarts(self) -> int:
        """How often the IO side died and was started again."""

    @abstractmethod
    def close(self) -> None:
        """Finish what was submitted, commit the index, release everything. Idempotent."""
