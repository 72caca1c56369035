"""Reading what chunk files say of themselves, many at a time."""

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

from aiofiles.os import wrap

from .chunk_file import HEADER_BYTES, chunk_path, file_bytes, parse_header
from .index import Row, row_of

BATCH_FILES = 128
"""Files per hop between the loop and a thread: a hop costs more than reading a header."""

MOST_BATCHES = 8


def read_headers(root: str, paths: Sequence[str]) -> list[Row | None]:
    """One per path: its row, or None if it is no whole header, or speaks of another place or size.

    Payloads are not read: whoever reads the chunk verifies it. Also works inside a running loop.
    """
    with ThreadPoolExecutor(1) as own_thread:
        return own_thread.submit(asyncio.run, _read_all(root, paths)).result()


async def _read_all(root: str, paths: Sequence[str]) -> list[Row | None]:
    limit = asyncio.Semaphore(MOST_BATCHES)
    read_batch = wrap(_read_batch)

    async def bounded(start: int) -> list[Row | None]:
        async with limit:
            return await read_batch(root, paths[start : start + BATCH_FILES])

    starts = range(0, len(paths), BATCH_FILES)
    return list(chain.from_iterable(await asyncio.gather(*map(bounded, starts))))


def _read_batch(root: str, paths: Sequence[str]) -> list[Row | None]:
    return [_read(root, path) for path in paths]


def _read(root: str, path: str) -> Row | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        parsed = parse_header(os.pread(fd, HEADER_BYTES, 0))
        stat = os.fstat(fd)
    except OSError:
        return None
    finally:
        os.close(fd)
    if parsed is None or chunk_path(root, parsed[0]) != path:
        return None
    meta, _ = parsed
    size_bytes = file_bytes(meta.stored_bytes, meta.codec)
    return row_of(meta, size_bytes, stat.st_mtime) if stat.st_size == size_bytes else None
