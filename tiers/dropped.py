"""Dropped namespace folders: unreachable at once by one rename, deleted in the background."""

import os
from pathlib import Path

from .chunk_file import CHUNKS, DROPPED
from .errors import TierError
from .io.base import Completion, ReclaimJob, Status
from .ledger import Ledger


class DroppedFolders:
    """Folders under dropped/, and the bytes they may still hold."""

    def __init__(self, root: Path, folders: dict[str, int], ledger: Ledger) -> None:
        self._root = root
        self._ledger = ledger
        self._bytes = dict(folders)
        for name in folders:
            self._reclaim(name)

    def __bool__(self) -> bool:
        return bool(self._bytes)

    @property
    def used_bytes(self) -> int:
        return sum(self._bytes.values())

    def drop(self, name: str, size_bytes: int, successor: str) -> None:
        """Put chunks/`name` out of reach, also after a crash, and start `successor` empty.

        Waits for the disk to have remembered it. Raises TierError when it refuses.
        """
        old = self._root / CHUNKS / name
        try:
            os.rename(old, self._root / DROPPED / name)
            (self._root / CHUNKS / successor).mkdir(mode=0o700)
            for folder in (CHUNKS, DROPPED):
                _fsync(self._root / folder)
        except OSError as error:
            self._ledger.leaked_bytes += size_bytes
            raise TierError(
                f"{old} could not be dropped ({error}); delete it before the store is opened again"
            ) from error
        self._bytes[name] = size_bytes
        self._reclaim(name)

    def hold(self, size_bytes: int) -> None:
        """A job from before a drop ended: what it was charged with may lie in the oldest folder."""
        if self._bytes:
            self._bytes[next(iter(self._bytes))] += size_bytes

    def apply(self, job: ReclaimJob, done: Completion) -> None:
        left_bytes = max(0, self._bytes.pop(job.name) - done.file_bytes)
        if done.status is Status.FAILED:
            self._ledger.leaked_bytes += left_bytes
        elif done.status is not Status.OK:
            self._bytes[job.name] = left_bytes
            self._reclaim(job.name)

    def _reclaim(self, name: str) -> None:
        self._ledger.queue(lambda job_id: ReclaimJob(job_id, name))


def _fsync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
