"""Reads and checks every chunk file of a store, around the page cache; repairs by dropping."""

import asyncio
import mmap
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiofiles
import lmdb
import xxhash
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table

from .chunk_file import (
    CHUNKS,
    HEADER_BYTES,
    INDEX,
    chunk_path,
    file_bytes,
    parse_header,
    parse_name,
    supports_o_direct,
)
from .directory import claim, require_store
from .index import rewrite
from .io.base import NO_PARENT

READS_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Checked:
    """One file. key and parent are empty, and why says so, when it is bad."""

    path: str
    size_bytes: int
    key: bytes = b""
    parent: bytes = b""
    why: str = ""


def verify_store(
    root: Path, *, repair: bool = False, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Check every file, and that every chunk can be reached from a head; with repair, drop the bad
    ones and what hangs from them. progress is called with (files done, files in all).

    Raises ValueError if `root` is no store, TierError if it is in use or of another format.
    """
    require_store(root)
    lock = claim(root)
    try:
        paths = sorted(str(path) for path in (root / CHUNKS).rglob("*") if path.is_file())
        direct = os.O_DIRECT if supports_o_direct(root) else 0
        checked = asyncio.run(_Reader(str(root), direct).check_all(paths, progress))
        bad = [file for file in checked if file.why]
        orphans = _orphans([file for file in checked if not file.why])
        if repair:
            _drop(root, [*bad, *orphans])
    finally:
        lock.close()
    return {
        "path": str(root),
        "chunks": len(checked),
        "bytes": sum(file.size_bytes for file in checked),
        "bad": [{"file": file.path, "why": file.why} for file in bad],
        "orphans": len(orphans),
        "dropped": len(bad) + len(orphans) if repair else 0,
    }


def table(result: dict[str, Any]) -> Group:
    view = Table("file", "what is wrong", box=SIMPLE_HEAD)
    for bad in result["bad"]:
        view.add_row(Path(bad["file"]).name, bad["why"])
    read = f"{result['path']}: read {result['chunks']} files, {result['bytes'] / 2**20:.1f} MiB"
    found = f"{len(result['bad'])} bad, {result['orphans']} below a chunk that is missing or bad"
    verdict = f"{found}, {result['dropped']} dropped" if result["dropped"] else found
    return Group(*([view] if result["bad"] else []), f"{read}; {verdict}")


class _Reader:
    """Reads whole files into page-aligned buffers, a few at a time."""

    def __init__(self, root: str, direct: int) -> None:
        self._root = root
        self._direct = direct
        self._buffers: list[mmap.mmap] = []
        self._places = asyncio.Semaphore(READS_AT_ONCE)

    async def check_all(
        self, paths: list[str], progress: Callable[[int, int], None]
    ) -> list[Checked]:
        checked: list[Checked] = []
        tasks = [asyncio.ensure_future(self._check(path)) for path in paths]
        for task in asyncio.as_completed(tasks):
            checked.append(await task)
            progress(len(checked), len(paths))
        return sorted(checked, key=lambda file: file.path)

    async def _check(self, path: str) -> Checked:
        async with self._places:
            size_bytes = os.path.getsize(path)
            try:
                async with self._buffer(max(size_bytes, HEADER_BYTES)) as buffer:
                    read_bytes = await self._read(path, buffer)
                    return self._judge(path, size_bytes, memoryview(buffer)[:read_bytes])
            except OSError as error:
                return Checked(path, size_bytes, why=f"cannot be read: {error.strerror}")

    async def _read(self, path: str, buffer: mmap.mmap) -> int:
        def opener(name: str, flags: int) -> int:
            return os.open(name, flags | self._direct)

        async with aiofiles.open(path, "rb", buffering=0, opener=opener) as file:
            return await file.readinto(buffer) or 0

    def _judge(self, path: str, size_bytes: int, content: memoryview) -> Checked:
        parsed = parse_header(content[:HEADER_BYTES])
        if parsed is None:
            return Checked(path, size_bytes, why="its header is damaged")
        meta, digest = parsed
        stored = content[HEADER_BYTES : HEADER_BYTES + meta.stored_bytes]
        why = ""
        if chunk_path(self._root, meta) != path:
            why = "it holds another chunk"
        elif size_bytes != file_bytes(meta.stored_bytes, meta.codec):
            why = "its size is wrong"
        elif xxhash.xxh3_128_digest(stored) != digest:
            why = "its payload is damaged"
        return Checked(path, size_bytes, meta.key, meta.parent, why)

    @asynccontextmanager
    async def _buffer(self, size_bytes: int) -> AsyncIterator[mmap.mmap]:
        buffer = self._buffers.pop() if self._buffers else mmap.mmap(-1, size_bytes)
        if len(buffer) < size_bytes:
            buffer = mmap.mmap(-1, size_bytes)
        yield buffer
        self._buffers.append(buffer)


def _orphans(good: list[Checked]) -> list[Checked]:
    """Whole files that no lookup can reach any more."""
    reachable = {NO_PARENT}
    waiting = good
    while True:
        hanging = [file for file in waiting if file.parent not in reachable]
        if len(hanging) == len(waiting):
            return hanging
        reachable.update(file.key for file in waiting if file.parent in reachable)
        waiting = hanging


def _drop(root: Path, files: list[Checked]) -> None:
    for file in files:
        os.unlink(file.path)
    keys = [key for file in files if (key := parse_name(Path(file.path).name)) is not None]
    try:
        rewrite(root / INDEX, [], keys)
    except lmdb.Error as error:  # rebuilt from the files when the store opens
        raise ValueError(f"{root / INDEX} is damaged ({error}); delete it") from error
