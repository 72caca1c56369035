"""From a format's requests, in whatever order its records come, to a Trace."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...admission.jit import jit
from .prefix_trie import PrefixTrie
from .trace import Trace

CHUNK_TOKENS = 256
"""What smaller blocks are folded to, as near as whole blocks come from below."""

_MOST_WAITING = 1 << 20
"""Block ids that wait to be named, at eight bytes each."""


class Requests:
    """Requests whose chunks have numbers already, each in order of first appearance."""

    def __init__(self) -> None:
        self._times_s = array("d")
        self._input_tokens = array("q")
        self._output_tokens = array("q")
        self._counts = array("q")
        self._ids: list[NDArray[np.int32]] = []

    def __len__(self) -> int:
        return len(self._times_s)

    def add(self, time_s: float, input_tokens: int, output_tokens: int, chunks: int) -> None:
        """One more request; its chunks follow by add_ids, in the same order."""
        self._times_s.append(time_s)
        self._input_tokens.append(input_tokens)
        self._output_tokens.append(output_tokens)
        self._counts.append(chunks)

    def add_ids(self, ids: NDArray[np.int32]) -> None:
        self._ids.append(ids)

    def trace(self, name: str, chunk_tokens: int, notes: tuple[str, ...]) -> Trace:
        """The requests by time, those of one moment as they came. Leaves nothing behind."""
        ids = np.concatenate([np.empty(0, np.int32), *self._ids])
        self._ids.clear()
        offsets = _offsets(self._counts)
        times_s = np.array(self._times_s)
        order = np.argsort(times_s, kind="stable")
        if (order[1:] < order[:-1]).any():
            ids, offsets = _arrange(ids, offsets, order), _offsets(_column(self._counts)[order])
        times_s = times_s[order]
        return Trace(
            name=name,
            ids=ids,
            offsets=offsets,
            times_s=times_s - times_s[:1],
            input_tokens=_column(self._input_tokens)[order],
            output_tokens=_column(self._output_tokens)[order],
            chunk_tokens=chunk_tokens,
            notes=notes,
        )


class BlockRequests:
    """Requests as lists of block ids, which become chunks of one or more whole blocks.

    Blocks under 256 tokens are folded: a chunk is as many as fit into 256 tokens, and what does
    not fill one at a prompt's end is left out. Larger blocks are chunks as they are, and so is a
    prompt's last one that is not full.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block = block_tokens
        self._fold = max(1, CHUNK_TOKENS // block_tokens)
        self._trie = PrefixTrie(self._fold)
        self._requests = Requests()
        self._scope = self._trie.new_scope()
        self._scopes, self._lengths, self._counts = array("q"), array("q"), array("q")
        self._ids = array("Q")

    def new_scope(self) -> None:
        """Ids added from now on have nothing in common with those before."""
        self._scope = self._trie.new_scope()

    def add(self, time_s: float, input_tokens: int, output_tokens: int, ids: array[int]) -> None:
        """One request with the ids of its prompt's blocks, head first."""
        most = -(-input_tokens // self._block)
        if len(ids) > most:
            raise ValueError(
                f"{len(ids)} blocks of {self._block} tokens in a prompt of {input_tokens} tokens,"
                f" must be at most {most}"
            )
        chunks = len(ids)
        if self._fold > 1:
            chunks = min(chunks, input_tokens // self._block) // self._fold
        self._requests.add(time_s, input_tokens, output_tokens, chunks)
        self._scopes.append(self._scope)
        self._lengths.append(len(ids))
        self._counts.append(chunks)
        self._ids.extend(ids)
        if len(self._ids) >= _MOST_WAITING:
            self._name_chunks()

    def trace(self, name: str, notes: tuple[str, ...]) -> Trace:
        """Leaves nothing behind."""
        self._name_chunks()
        del self._trie
        return self._requests.trace(name, self._block * self._fold, (*notes, self._note()))

    def _name_chunks(self) -> None:
        columns = (self._scopes, self._lengths, self._counts)
        scopes, lengths, counts = (_column(column) for column in columns)
        ids = np.array(self._ids)
        self._requests.add_ids(self._trie.chunks(scopes, ids, lengths, counts))
        self._scopes, self._lengths, self._counts = array("q"), array("q"), array("q")
        self._ids = array("Q")

    def _note(self) -> str:
        if self._fold == 1:
            return (
                f"Chunks are the trace's blocks of {self._block} tokens. It does not say where in"
                " a block prompts part; a prompt's last block counts whole even where it is not."
            )
        return (
            f"{self._fold} blocks of {self._block} tokens are folded into a chunk of"
            f" {self._fold * self._block}; what does not fill one at a prompt's end is left out."
        )


def _column(values: array[Any]) -> NDArray[np.int64]:
    return np.array(values, np.int64)


def _offsets(counts: array[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(np.asarray(counts, np.int64), out=offsets[1:])
    return offsets


@jit
def _arrange(
    ids: NDArray[np.int32], offsets: NDArray[np.int64], order: NDArray[np.int64]
) -> NDArray[np.int32]:
    """The requests' ids in `order`, numbered again as they appear there."""
    number = np.full(ids.max() + 1 if len(ids) else 0, -1, np.int32)
    out = np.empty_like(ids)
    at, known = 0, 0
    for r in order:
        for i in range(offsets[r], offsets[r + 1]):
            if number[ids[i]] < 0:
                number[ids[i]], known = known, known + 1
            out[at], at = number[ids[i]], at + 1
    return out
