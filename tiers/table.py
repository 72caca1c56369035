"""What NVMe holds, in memory: a dict from key to row, and columns of plain numbers.

Objects would take three times the memory and, with a million chunks, wake the garbage collector.
"""

from array import array
from collections.abc import Iterable, Iterator

from ..admission.base import Key
from .io.base import NO_PARENT, ChunkMeta, Codec, FileRef


class ChunkTable:
    """Rows of chunk files. A row is valid from add() until remove()."""

    def __init__(self) -> None:
        self._rows: dict[Key, int] = {}
        self._free: list[int] = []
        self._names: list[tuple[bytes, int]] = []  # (namespace, generation), few and shared
        self._parents: list[Key] = []
        self._name = array("H")
        self._num_tokens = array("i")
        self._payload_bytes = array("q")
        self._stored_bytes = array("q")
        self._codec = array("B")
        self.file_bytes = array("q")
        self.last_use_s = array("d")
        self.hits = array("Q")
        self.writing = array("B")
        """1 while the file is being written: the chunk is not readable yet."""

    def add(
        self,
        meta: ChunkMeta,
        file_bytes: int,
        last_use_s: float,
        *,
        hits: int = 0,
        writing: int = 0,
    ) -> int:
        row = self._free.pop() if self._free else self._grow()
        self._rows[meta.key] = row
        self._parents[row] = meta.parent
        self._name[row] = self._name_index(meta.namespace, meta.generation)
        self._num_tokens[row] = meta.num_tokens
        self._payload_bytes[row] = meta.payload_bytes
        self._stored_bytes[row] = meta.stored_bytes
        self._codec[row] = meta.codec
        self.file_bytes[row] = file_bytes
        self.last_use_s[row] = last_use_s
        self.hits[row] = hits
        self.writing[row] = writing
        return row

    def written(self, row: int, codec: Codec, stored_bytes: int, file_bytes: int) -> None:
        """The file is in place: what was stored is known now."""
        self._codec[row] = codec
        self._stored_bytes[row] = stored_bytes
        self.file_bytes[row] = file_bytes
        self.writing[row] = 0

    def use(self, keys: Iterable[Key], now_s: float, hits: int) -> list[Key]:
        """Those of the keys that are here, used now and hit so often more."""
        here = list(filter(self._rows.__contains__, keys))
        last_use_s, all_hits = self.last_use_s, self.hits
        for row in map(self._rows.__getitem__, here):
            last_use_s[row] = now_s
            all_hits[row] += hits
        return here

    def remove(self, key: Key) -> int:
        """The row that `key` had, free for another from now on."""
        row = self._rows.pop(key)
        self._parents[row] = NO_PARENT
        self._free.append(row)
        return row

    def row(self, key: Key) -> int | None:
        return self._rows.get(key)

    def num_tokens(self, row: int) -> int:
        return self._num_tokens[row]

    def parent(self, row: int) -> Key | None:
        parent = self._parents[row]
        return None if parent == NO_PARENT else parent

    def meta(self, key: Key) -> ChunkMeta:
        row = self._rows[key]
        namespace, generation = self._names[self._name[row]]
        return ChunkMeta(
            namespace=namespace,
            generation=generation,
            key=key,
            parent=self._parents[row],
            num_tokens=self._num_tokens[row],
            payload_bytes=self._payload_bytes[row],
            stored_bytes=self._stored_bytes[row],
            codec=Codec(self._codec[row]),
        )

    def file(self, key: Key) -> FileRef:
        row = self._rows[key]
        namespace, generation = self._names[self._name[row]]
        return FileRef(namespace, generation, key, self.file_bytes[row])

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._rows)

    def _name_index(self, namespace: bytes, generation: int) -> int:
        name = (namespace, generation)
        if not self._names or self._names[-1] != name:
            if name in self._names:
                return self._names.index(name)
            self._names.append(name)
        return len(self._names) - 1

    def _grow(self) -> int:
        self._parents.append(NO_PARENT)
        for column in (
            self._name,
            self._num_tokens,
            self._payload_bytes,
            self._stored_bytes,
            self._codec,
            self.file_bytes,
            self.last_use_s,
            self.hits,
            self.writing,
        ):
            column.append(0)
        return len(self._parents) - 1
