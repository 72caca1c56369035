"""Which IO backend a store gets."""

from pathlib import Path
from typing import Literal

from ..arena import ArenaMapping
from .base import IoBackend
from .process import ProcessBackend
from .threads import ThreadBackend


def open_backend(
    kind: Literal["process", "threads"],
    root: Path,
    arena: ArenaMapping,
    *,
    lanes: int = 4,
    itemsize: int,
    lock_fd: int,
) -> IoBackend:
    """A backend over a directory that `open_directory` recovered and whose lock `lock_fd` is.

    itemsize: bytes per element of the KV, for the byte planes of compressed chunks. Raises
    TierError when no process can be started.
    """
    if kind == "process":
        return ProcessBackend(root, arena, lanes=lanes, itemsize=itemsize, lock_fd=lock_fd)
    return ThreadBackend(root, arena, lanes=lanes, itemsize=itemsize)
