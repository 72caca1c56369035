"""Chunk files that share one eviction order: rows, order, bytes, and what the index must learn of
their use."""

import time

from ..admission.base import Chain, EvictionOrder, Key
from .io.base import NO_PARENT, ChunkMeta, FileRef
from .table import ChunkTable

MAX_HITS = 2**32 - 1
"""The index keeps hits in 32 bits."""


class Shelf:
    def __init__(self, order: EvictionOrder) -> None:
        self.table = ChunkTable()
        self.order = order
        self.resident_bytes = 0
        """Bytes of the files in place; files being written are the ledger's."""
        self._touched: set[Key] = set()

    def expect(self, meta: ChunkMeta, size_bytes: int) -> None:
        """A file is about to be written. Its ancestors are no victims from now on."""
        self.order.add(meta.key, _parent(meta))
        self.table.add(meta, size_bytes, time.time(), writing=1)

    def put(self, meta: ChunkMeta, size_bytes: int, last_use_s: float, hits: int) -> None:
        """A file that is in place already."""
        self.order.add(meta.key, _parent(meta))
        self.table.add(meta, size_bytes, last_use_s, hits=hits)
        self.resident_bytes += size_bytes

    def discard(self, key: Key) -> bool:
        """Forget a chunk; True when its file was still being written."""
        row = self.table.remove(key)
        self.order.discard(key)
        if not self.table.writing[row]:
            self.resident_bytes -= self.table.file_bytes[row]
        return bool(self.table.writing[row])

    def take(self, key: Key) -> FileRef:
        """Forget a chunk that is in place; its file is the caller's to remove."""
        file = self.table.file(key)
        self.discard(key)
        return file

    def touch(self, chain: Chain, stop: int, hits: int) -> None:
        here = self.table.use(chain[:stop], time.time(), hits)
        self._touched.update(here)
        self.order.touch(here, len(here))

    @property
    def num_touched(self) -> int:
        return len(self._touched)

    def take_touched(self) -> list[tuple[Key, float, int]]:
        """(key, last use in seconds since the epoch, hits) of what was used since the last call."""
        rows = [(key, self.table.row(key)) for key in self._touched]
        self._touched.clear()
        return [
            (key, self.table.last_use_s[row], min(self.table.hits[row], MAX_HITS))
            for key, row in rows
            if row is not None
        ]

    def check_integrity(self) -> None:
        self.order.check_integrity()
        assert len(self.order) == len(self.table)
        resident_bytes = 0
        for key in self.table:
            row = self.table.row(key)
            assert row is not None
            assert key in self.order
            if not self.table.writing[row]:
                resident_bytes += self.table.file_bytes[row]
            parent = self.table.parent(row)
            assert parent is None or parent in self.table, f"{key.hex()} hangs from nothing"
        assert resident_bytes == self.resident_bytes


def _parent(meta: ChunkMeta) -> Key | None:
    return None if meta.parent == NO_PARENT else meta.parent
