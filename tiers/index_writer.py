"""The thread that commits changes to the index, on the IO side."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import lmdb

from .index import Change, Delete, Put, Touch, commit, environment, identity, row_of, set_trusted
from .io.base import ChunkMeta, FileRef

BATCH_CHANGES = 64
BATCH_DELAY_S = 1.0
MOST_CHANGES = 4096
"""Per commit, so that what a full queue holds does not become one long one."""

_log = logging.getLogger(__name__)


class IndexWriter:
    """Takes changes from any thread and commits them when there are BATCH_CHANGES of them, or
    BATCH_DELAY_S after the first.

    Nothing here raises: changes that could not be written are forgotten, and `failures` counts
    how often that was.
    """

    def __init__(self, path: Path, pause: Callable[[str], None]) -> None:
        self.failures = 0
        self._pause = pause
        self._changes: deque[Change] = deque()
        self._some = threading.Event()
        self._enough = threading.Event()
        self._closing = False
        self._release = ExitStack()
        self._env: lmdb.Environment | None = None
        self._trusted = False
        try:
            self._env = self._release.enter_context(environment(path))
            # Before the first file changes: a crash from now on makes the next opening look twice.
            self._trusted = set_trusted(self._env, False)
        except (lmdb.Error, OSError) as error:
            self._failed(error)
        self._thread = threading.Thread(target=self._run, name="rootcellar-index", daemon=True)
        self._thread.start()

    def put(self, meta: ChunkMeta, file_bytes: int, last_use_s: float) -> None:
        self._add(Put(row_of(meta, file_bytes, last_use_s)))

    def delete(self, file: FileRef) -> None:
        """Unless the row speaks of another life of the namespace by now."""
        self._add(Delete(file.key, identity(file.namespace, file.generation)))

    def touch(self, key: bytes, last_use_s: float, hits: int) -> None:
        self._add(Touch(key, last_use_s, hits))

    def close(self) -> None:
        """Commit what is left. No change may come any more."""
        self._closing = True
        self._some.set()
        self._enough.set()
        self._thread.join()
        if self._env is not None and self._trusted and not self.failures:
            try:
                set_trusted(self._env, True)
            except lmdb.Error as error:
                self._failed(error)
        self._env = None
        self._release.close()

    def _add(self, change: Change) -> None:
        self._changes.append(change)
        if not self._some.is_set():
            self._some.set()
        if len(self._changes) >= BATCH_CHANGES:
            self._enough.set()

    def _run(self) -> None:
        while not self._closing or self._changes:
            self._some.wait()
            self._enough.wait(BATCH_DELAY_S)
            # Cleared before taking: a change that comes in between sets them again.
            self._some.clear()
            self._enough.clear()
            while self._changes:
                self._commit()

    def _commit(self) -> None:
        number = min(MOST_CHANGES, len(self._changes))
        batch = [self._changes.popleft() for _ in range(number)]
        try:
            if self._env is not None:
                self._pause("commit")
                commit(self._env, batch)
        except (lmdb.Error, OSError) as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        if not self.failures:
            _log.warning("the index cannot be written (%s): the next opening takes longer", error)
        self.failures += 1
