"""Names for whole prefixes: a trie over block ids, in which every whole chunk gets a number.

Block ids of public traces may name a block's prefix or its text alone, and may hold in one session
only. In a trie they mean the same: equal numbers are equal paths from the root of their scope.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ...admission.jit import jit
from .pair_table import Columns, PairTable, find

T = TypeVar("T", bound=np.generic)

MOST_NODES = 2**31 - 2


class PrefixTrie:
    """Grows by whole requests. A node costs 16 bytes, and 32 to 64 more where it is not the first
    child of its parent.

    Node 0 is nobody: as a first child it says that there is none.
    """

    def __init__(self, blocks_per_chunk: int) -> None:
        self._step = blocks_per_chunk
        self._num_nodes = 1
        self._num_chunks = 0
        self._first_child = np.zeros(1024, np.int32)
        self._first_id = np.zeros(1024, np.uint64)
        self._chunk = np.zeros(1024, np.int32)
        self._others = PairTable()

    @property
    def num_chunks(self) -> int:
        return self._num_chunks

    def new_scope(self) -> int:
        """A root of its own: ids under it have nothing in common with those under another."""
        self._reserve(1)
        self._num_nodes += 1
        return self._num_nodes - 1

    def chunks(
        self,
        scopes: NDArray[np.int64],
        ids: NDArray[np.uint64],
        lengths: NDArray[np.int64],
        counts: NDArray[np.int64],
    ) -> NDArray[np.int32]:
        """Chunk numbers of requests in a row, in the order of `ids`.

        Request r has its root scopes[r], the next lengths[r] ids, and counts[r] chunks, which take
        the first counts[r] * blocks_per_chunk of them.
        """
        self._reserve(len(ids))
        self._others.reserve(len(ids))
        out = np.empty(int(counts.sum()), np.int32)
        self._num_nodes, self._num_chunks, self._others.size = _walk(
            scopes,
            ids,
            lengths,
            counts,
            self._step,
            (self._num_nodes, self._num_chunks, self._others.size),
            (self._first_child, self._first_id, self._chunk),
            self._others.columns,
            out,
        )
        return out

    def _reserve(self, more: int) -> None:
        need = self._num_nodes + more
        if need > MOST_NODES:
            raise ValueError(f"the trace has over {MOST_NODES} blocks, split it")
        if need <= len(self._chunk):
            return
        room = max(need, 2 * len(self._chunk))
        self._first_child = _grown(self._first_child, room)
        self._first_id = _grown(self._first_id, room)
        self._chunk = _grown(self._chunk, room)


def _grown(column: NDArray[T], room: int) -> NDArray[T]:
    grown = np.zeros(room, column.dtype)
    grown[: len(column)] = column
    return grown


@jit
def _walk(
    scopes: NDArray[np.int64],
    ids: NDArray[np.uint64],
    lengths: NDArray[np.int64],
    counts: NDArray[np.int64],
    step: int,
    sizes: tuple[int, int, int],
    nodes: tuple[NDArray[np.int32], NDArray[np.uint64], NDArray[np.int32]],
    others: Columns,
    out: NDArray[np.int32],
) -> tuple[int, int, int]:
    first_child, first_id, chunk = nodes
    num_nodes, num_chunks, num_others = sizes
    begin, at = 0, 0
    for r in range(len(lengths)):
        node = scopes[r]
        i = begin
        for _ in range(counts[r]):
            for _ in range(step):
                child = int(first_child[node])
                if child == 0:
                    first_child[node], first_id[node] = num_nodes, ids[i]
                    child, num_nodes = num_nodes, num_nodes + 1
                elif first_id[node] != ids[i]:
                    # Only children after the first are looked up: most nodes have one, and the
                    # nodes of a path lie side by side.
                    slot = find(others, node, ids[i])
                    if others[2][slot] == 0:
                        others[0][slot], others[1][slot], others[2][slot] = node, ids[i], num_nodes
                        num_nodes, num_others = num_nodes + 1, num_others + 1
                    child = int(others[2][slot])
                node, i = child, i + 1
            if chunk[node] == 0:
                num_chunks += 1
                chunk[node] = num_chunks
            out[at], at = chunk[node] - 1, at + 1
        begin += lengths[r]
    return num_nodes, num_chunks, num_others
