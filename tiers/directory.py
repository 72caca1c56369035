"""The store directory: whether it may be opened, its lock, and its folders."""

import fcntl
import json
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

from .chunk_file import CHUNKS, DROPPED, FORMAT, FORMAT_VERSION, LOCK, TMP, WEIGHTS
from .errors import FormatVersionError, StoreLockedError

_NEW_FORMAT = f"{FORMAT}.new"
ORPHAN_GRACE_S = 5.0
"""How long to wait for a lock whose owner is dead: its IO worker is on the way out."""


def require_store(root: Path) -> None:
    """Changes nothing. Raises ValueError if `root` is no store, FormatVersionError for a format
    that this version cannot read."""
    if not root.exists():
        raise ValueError(f"{root} does not exist")
    if not (root / FORMAT).is_file():
        raise ValueError(f"{root} is not a store of rootcellar: it has no {FORMAT} file")
    _check_version(root)


def holder(root: Path) -> int | None:
    """The pid of the process that has the store open, if one has. Changes nothing."""
    try:
        pid = _read_pid(root / LOCK)
    except OSError:
        return None
    return pid if _runs(pid) else None


class DirectoryLock:
    """One owner per directory, by flock on `fd`: whoever inherits the descriptor (the IO worker)
    keeps the directory locked until it is gone too."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        """Idempotent. The lock is free when every process that shares it has let go."""
        if self.fd >= 0:
            with suppress(OSError):
                os.ftruncate(self.fd, 0)  # nobody's from now on, and there is no pid to recycle
            os.close(self.fd)
            self.fd = -1


def claim(root: Path) -> DirectoryLock:
    """Check, lock and lay out `root`, making it when absent; temporaries of a crash are removed.

    Raises ValueError for a path that cannot be a store, FormatVersionError and StoreLockedError;
    then nothing in it was changed.
    """
    try:
        _check(root)
        lock = _take(root)
        try:
            _lay_out(root)
        except BaseException:
            lock.close()
            raise
    except OSError as error:
        raise _unusable(root, str(error)) from error
    return lock


def clear_temporaries(root: Path) -> int:
    """Remove everything under tmp/; returns how many there were. Nobody may be writing."""
    entries = list(os.scandir(root / TMP))
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry)
        else:
            os.unlink(entry)
    return len(entries)


def _check(root: Path) -> None:
    if not root.exists() and root.parent.is_dir():
        root.mkdir(mode=0o700)
    if not root.exists():
        raise ValueError(f"{root} cannot be made: {root.parent} is missing. Make or mount it first")
    if not root.is_dir():
        raise _unusable(root, "it is not a directory")
    if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        raise _unusable(root, "it is not writable")
    names = set(os.listdir(root))
    # These: a first opening died, or its engine's weights were read first.
    others = names - {LOCK, CHUNKS, TMP, DROPPED, WEIGHTS, _NEW_FORMAT}
    if FORMAT in names:
        _check_version(root)
    elif others:
        raise _unusable(root, f"it holds other files, such as {min(others)!r}")


def _check_version(root: Path) -> None:
    try:
        version = json.loads((root / FORMAT).read_bytes())["version"]
    except (ValueError, TypeError, KeyError) as error:
        raise FormatVersionError(f"{root / FORMAT} says no format version ({error!r})") from error
    if version != FORMAT_VERSION:
        raise FormatVersionError(
            f"{root} has format version {version}, this rootcellar reads {FORMAT_VERSION};"
            " use the version that wrote it, or another directory"
        )


def _lay_out(root: Path) -> None:
    for folder in (CHUNKS, TMP, DROPPED):
        (root / folder).mkdir(mode=0o700, exist_ok=True)
    clear_temporaries(root)
    if not (root / FORMAT).exists():
        _write_format(root)


def _write_format(root: Path) -> None:
    """Whole or not at all, also when the machine loses power."""
    path = root / _NEW_FORMAT
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump({"format": "rootcellar", "version": FORMAT_VERSION}, file)
        file.flush()
        os.fsync(file.fileno())
    path.rename(root / FORMAT)


def _take(root: Path) -> DirectoryLock:
    fd = os.open(root / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _wait_for_lock(fd, root)
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    except BaseException:
        os.close(fd)  # the pid in it is not ours to remove
        raise
    return DirectoryLock(fd)


def _wait_for_lock(fd: int, root: Path) -> None:
    deadline_s = time.monotonic() + ORPHAN_GRACE_S
    while not _try_lock(fd):
        pid = _read_pid(root / LOCK)
        if _runs(pid) or time.monotonic() > deadline_s:
            who = f"process {pid}" if pid else "another process"
            raise StoreLockedError(f"{root} is in use by {who}; close it there or use another path")
        time.sleep(0.01)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_pid(path: Path) -> int:
    """The pid in the lock file; 0 while it is being written, and when nobody holds it."""
    digits = path.read_bytes().strip()
    return int(digits) if digits.isdigit() else 0


def _runs(pid: int) -> bool:
    """Whether the process lives; one that was killed and not yet waited for does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[0] not in (b"Z", b"X")


def _unusable(root: Path, why: str) -> ValueError:
    return ValueError(f"{root} cannot be a store: {why}. Use an empty or absent directory")
