"""Yardsticks: the same bytes moved by the plainest calls there are, with nothing kept in mind.

Reads go around the page cache where the file system can. Copies are one memcpy, or one per page
in a loop of C.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ..tiers.chunk_file import HEADER_BYTES

_PAGE_LOOP = r"""
#include <string.h>
void copy_pages(char *to, const char *from, const long *pages,
                long planes, long num_pages, long page_bytes, long plane_bytes) {
  for (long plane = 0; plane < planes; plane++)
    for (long i = 0; i < num_pages; i++, from += page_bytes)
      memcpy(to + plane * plane_bytes + pages[i] * page_bytes, from, page_bytes);
}
"""


@dataclass(frozen=True, slots=True)
class _Read:
    """When one preadv began and ended."""

    start_s: float
    end_s: float


class RawReader:
    """Reads as many files at once as there are targets, each with one preadv; not checked.

    targets: memory for one chunk each, page-aligned; the caller's, and in use during read() only.
    How a disk's speed depends on memory (touched or not, in one piece for the device or in many)
    is no small thing: compare with reads into the same. direct: O_DIRECT or 0. Owns its threads,
    one for each target, and its descriptors until close().
    """

    def __init__(self, paths: Sequence[Path], targets: Sequence[memoryview], direct: int) -> None:
        self.depth = len(targets)
        self._targets = targets
        self._headers = [mmap.mmap(-1, HEADER_BYTES) for _ in targets]
        self._asked = [SimpleQueue[int | None]() for _ in targets]
        self._ended = SimpleQueue[_Read | OSError]()
        with ExitStack() as undo:  # undone in reverse: the threads end before what they use goes
            self._fds = [_opened(path, direct, undo) for path in paths]
            for lane, asked in enumerate(self._asked):
                thread = threading.Thread(target=self._serve, args=(lane, asked), daemon=True)
                thread.start()
                undo.callback(thread.join)
                undo.callback(asked.put, None)
            self._release = undo.pop_all()

    def read(self, first: int) -> float:
        """Read files first, first + 1, … first + depth - 1; returns the seconds from the start of
        the first preadv to the end of the last. Raises OSError."""
        for lane, asked in enumerate(self._asked):
            asked.put(first + lane)
        ended = [self._ended.get() for _ in self._asked]
        for error in ended:
            if isinstance(error, OSError):
                raise error
        reads = [read for read in ended if isinstance(read, _Read)]
        return max(read.end_s for read in reads) - min(read.start_s for read in reads)

    def close(self) -> None:
        self._release.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _serve(self, lane: int, asked: SimpleQueue[int | None]) -> None:
        while (number := asked.get()) is not None:
            try:
                self._ended.put(self._read(lane, number))
            except OSError as error:
                self._ended.put(error)

    def _read(self, lane: int, number: int) -> _Read:
        target = self._targets[lane]
        buffers: list[mmap.mmap | memoryview] = [self._headers[lane], target]
        start_s = time.perf_counter()
        read_bytes = os.preadv(self._fds[number], buffers, 0)
        end_s = time.perf_counter()
        if read_bytes != HEADER_BYTES + len(target):
            raise OSError(f"chunk file {number} is shorter than it was written")
        return _Read(start_s, end_s)


class PageLoop:
    """memcpy page by page from a chunk to where its pages lie, in C.

    A chunk is `planes` planes (layers, times K and V) of num_pages pages of page_bytes each.
    """

    def __init__(self, library: Path, planes: int, page_bytes: int, plane_bytes: int) -> None:
        self._copy: Any = ctypes.CDLL(str(library)).copy_pages
        self._copy.restype = None
        self._copy.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_long] * 4
        self._planes, self._page_bytes, self._plane_bytes = planes, page_bytes, plane_bytes

    def copy(self, source: int, target: int, pages: npt.NDArray[np.int_]) -> None:
        """source: address of the chunk. target: of page 0 of plane 0. pages: one number each."""
        sizes = (self._planes, len(pages), self._page_bytes, self._plane_bytes)
        self._copy(target, source, pages.ctypes.data, *sizes)


def build_page_loop(folder: Path) -> Path | None:
    """The compiled loop, in `folder`; None where this machine has no C compiler that works."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    library = folder / "page_loop.so"
    command = [compiler, "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    done = subprocess.run(command, input=_PAGE_LOOP.encode(), capture_output=True, check=False)
    return library if done.returncode == 0 else None


def _opened(path: Path, direct: int, undo: ExitStack) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | direct)
    undo.callback(os.close, fd)
    return fd
