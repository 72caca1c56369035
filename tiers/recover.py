"""Opening a store directory: what is really there, after whatever happened.

Files are the truth: the index only saves the reading of their headers. What comes out is a set of
chunks in which every chunk's parent is there too, and a count of every byte on disk.
"""

import logging
import os
import shutil
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import lmdb

from .chunk_file import (
    CHUNKS,
    DROPPED,
    INDEX,
    SUFFIX,
    TRANSIENT,
    chunk_path,
    folder_name,
    parse_folder,
)
from .directory import DirectoryLock, claim
from .headers import read_headers
from .index import Loaded, Row, load, paused_gc, rewrite
from .io.base import NO_PARENT

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a directory holds. The caller owns the lock and closes it last.

    entries: the chunk files in place, the one used longest ago first. dropped: folders under
    dropped/ and their bytes. generations: of each namespace that has chunks. repaired: how many
    of what was put right.
    """

    entries: list[Row]
    dropped: list[tuple[str, int]]
    generations: dict[bytes, int]
    lock: DirectoryLock
    repaired: Counter[str]


def open_directory(root: Path) -> Recovered:
    """Claim `root` and reconcile it. Blocks; nothing else may have it open.

    Raises what `claim` raises, and ValueError when the disk cannot be read or put right.
    """
    lock = claim(root)
    try:
        with paused_gc():
            return _Recovery(root).run(lock)
    except OSError as error:
        lock.close()
        raise ValueError(f"{root} cannot be recovered: {error}. Repair the disk first") from error
    except BaseException:
        lock.close()
        raise


class _Recovery:
    """One pass over a directory; nothing is kept but what `run` returns."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._repaired: Counter[str] = Counter()
        self._adopted: list[Row] = []
        """Rows that the index does not have yet."""
        self._gone: list[bytes] = []
        """Keys whose rows the index must lose."""

    def run(self, lock: DirectoryLock) -> Recovered:
        loaded = self._load()
        newest = self._newest_folders()
        by_folder: defaultdict[tuple[bytes, int], list[Row]] = defaultdict(list)
        for row in loaded.rows:
            by_folder[row.namespace, row.generation].append(row)
        rows: list[Row] = []
        generations: dict[bytes, int] = {}
        for name in newest.items():
            kept = self._reconcile(*name, by_folder.pop(name, []), loaded.trusted)
            rows += kept
            generations |= dict([name] if kept else [])
        for stale in by_folder.values():
            self._forget(stale, "rows without a file")
        self._save(loaded.trusted)
        rows.sort(key=lambda row: row.last_use_s)
        return Recovered(rows, self._dropped(), generations, lock, self._repaired)

    # The index -------------------------------------------------------------------------------

    def _load(self) -> Loaded:
        path = self._root / INDEX
        if not path.exists():
            return Loaded([], False)
        try:
            return load(path)
        except (lmdb.Error, OSError) as error:
            _log.warning("the index of %s is lost (%s): reading every header", self._root, error)
            self._repaired["index rebuilt"] += 1
            _remove(path)
            return Loaded([], False)

    def _save(self, trusted: bool) -> None:
        if trusted and not self._adopted and not self._gone:
            return
        try:
            rewrite(self._root / INDEX, self._adopted, self._gone, trust=True)
        except (lmdb.Error, OSError) as error:
            _log.warning("the index of %s cannot be written: %s", self._root, error)
            self._repaired["index not written"] += 1

    # Folders ---------------------------------------------------------------------------------

    def _newest_folders(self) -> dict[bytes, int]:
        """Each namespace's latest life; whatever else lies in chunks/ is moved out of reach."""
        newest: dict[bytes, int] = {}
        others: list[str] = []
        for name in os.listdir(self._root / CHUNKS):
            parsed = parse_folder(name)
            if parsed is None:
                others.append(name)
                continue
            namespace, generation = parsed
            if generation >= TRANSIENT:
                others.append(name)
                continue
            latest = max(generation, newest.get(namespace, -1))
            older = min(generation, newest.get(namespace, generation))
            newest[namespace] = latest
            if older != latest:
                others.append(folder_name(namespace, older))
        for name in others:
            self._drop_folder(name)
        return newest

    def _drop_folder(self, name: str) -> None:
        target = self._root / DROPPED / name
        if target.exists():
            target = target.with_name(f"{name}-{uuid.uuid4().hex}")
        os.rename(self._root / CHUNKS / name, target)
        self._repaired["folders dropped"] += 1

    def _dropped(self) -> list[tuple[str, int]]:
        folders: list[tuple[str, int]] = []
        for entry in os.scandir(self._root / DROPPED):
            if entry.is_dir(follow_symlinks=False):
                folders.append((entry.name, _tree_bytes(entry.path)))
            else:
                os.unlink(entry)
        return folders

    # Chunk files -----------------------------------------------------------------------------

    def _reconcile(
        self, namespace: bytes, generation: int, rows: list[Row], trusted: bool
    ) -> list[Row]:
        """The rows of one folder's chunks that may stay, after all others were deleted."""
        folder = self._root / CHUNKS / folder_name(namespace, generation)
        kept, strangers = self._compare(str(folder), rows)
        if not trusted:
            kept = self._check_sizes(kept)
        adopted = self._adopt(strangers)
        kept = self._without_orphans(kept + adopted)
        keys = {row.key for row in kept} if adopted else set[bytes]()
        self._adopted += [row for row in adopted if row.key in keys]
        if not kept:
            _remove(folder)
        return kept

    def _compare(self, folder: str, rows: list[Row]) -> tuple[list[Row], list[str]]:
        """Rows whose file is there, and paths that have no row."""
        by_shard: defaultdict[str, list[Row]] = defaultdict(list)
        for row in rows:
            by_shard[row.key[:1].hex()].append(row)
        kept: list[Row] = []
        strangers: list[str] = []
        for shard in os.listdir(folder):
            path = f"{folder}/{shard}"
            if not os.path.isdir(path):
                strangers.append(path)
                continue
            names = set(os.listdir(path))
            for row in by_shard.pop(shard, ()):
                name = row.key.hex() + SUFFIX
                if name in names:
                    names.remove(name)
                    kept.append(row)
                else:
                    self._forget([row], "rows without a file")
            strangers += [f"{path}/{name}" for name in names]
        for stale in by_shard.values():
            self._forget(stale, "rows without a file")
        return kept, strangers

    def _check_sizes(self, rows: list[Row]) -> list[Row]:
        """Only after an unclean end: a file that was whole once and renamed keeps its size."""
        right: list[Row] = []
        wrong: list[Row] = []
        for row in rows:
            size_bytes = os.lstat(chunk_path(str(self._root), row)).st_size
            (right if size_bytes == row.file_bytes else wrong).append(row)
        self._delete(wrong, "files of a wrong size")
        return right

    def _adopt(self, paths: list[str]) -> list[Row]:
        """The rows of files that are what their name says; the others are deleted."""
        if not paths:
            return []
        rows = read_headers(str(self._root), paths)
        for path, row in zip(paths, rows, strict=True):
            if row is None:
                _remove(Path(path))
                self._repaired["files deleted"] += 1
        adopted = [row for row in rows if row is not None]
        self._count("files without a row", len(adopted))
        return adopted

    def _without_orphans(self, rows: list[Row]) -> list[Row]:
        """A chunk whose parent is gone can never be reached again, nor can any below it."""
        keys = {row.key for row in rows}
        keys.add(NO_PARENT)
        fresh = [row for row in rows if row.parent not in keys]
        if not fresh:
            return rows
        children: defaultdict[bytes, list[Row]] = defaultdict(list)
        for row in rows:
            children[row.parent].append(row)
        orphans: dict[bytes, Row] = {}
        while fresh:
            row = fresh.pop()
            orphans[row.key] = row
            fresh += children[row.key]
        self._delete(orphans.values(), "orphans")
        return [row for row in rows if row.key not in orphans]

    def _delete(self, rows: Iterable[Row], what: str) -> None:
        gone = list(rows)
        for row in gone:
            os.unlink(chunk_path(str(self._root), row))
        self._forget(gone, what)

    def _forget(self, rows: list[Row], what: str) -> None:
        self._gone += [row.key for row in rows]
        self._count(what, len(rows))

    def _count(self, what: str, number: int) -> None:
        if number:
            self._repaired[what] += number


def _tree_bytes(folder: str) -> int:
    return sum(
        os.lstat(f"{parent}/{name}").st_size
        for parent, _, names in os.walk(folder)
        for name in names
    )


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
