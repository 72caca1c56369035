"""Requests in order of arrival, as every policy and every bound is asked about them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Trace:
    """A trace in memory: four bytes for every chunk that a request refers to, and no text.

    name: the file's, without folders.
    ids: int32, the chunks of all requests, head first, in order of arrival. Equal ids mean equal
        whole prefixes; ids are numbered from 0 in order of first appearance.
    offsets: int64, num_requests + 1 of them: request r is ids[offsets[r]:offsets[r + 1]], which is
        empty when its prompt fills no chunk.
    times_s: float64, when each request arrived; ascending, the first at 0.
    input_tokens, output_tokens: int64, of each request; 0 where the format does not say.
    chunk_tokens: tokens in a chunk.
    notes: what was done to the trace's blocks and what was left out; sentences for a report.
    parents: int32, by id: the chunk before it, -1 for a head.
    """

    name: str
    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    times_s: NDArray[np.float64]
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    chunk_tokens: int
    notes: tuple[str, ...] = ()
    parents: NDArray[np.int32] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parents", _parents(self.ids, self.offsets))

    @property
    def num_requests(self) -> int:
        return len(self.times_s)

    @property
    def refs(self) -> int:
        return len(self.ids)

    @property
    def distinct(self) -> int:
        return len(self.parents)

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last."""
        return float(self.times_s[-1]) if self.num_requests else 0.0

    def check_integrity(self) -> None:
        """Raise AssertionError unless every id has one parent and everything else holds, too."""
        assert len(self.offsets) == self.num_requests + 1
        assert len(self.input_tokens) == len(self.output_tokens) == self.num_requests
        assert self.offsets[0] == 0
        assert self.offsets[-1] == self.refs
        assert (np.diff(self.offsets) >= 0).all()
        assert (np.diff(self.times_s) >= 0).all()
        assert not self.num_requests or self.times_s[0] == 0
        assert np.array_equal(np.unique(self.ids), np.arange(self.distinct))
        assert (self.parents < np.arange(self.distinct)).all()
        assert (self.parents[self.ids] == _before(self.ids, self.offsets)).all()


def _before(ids: NDArray[np.int32], offsets: NDArray[np.int64]) -> NDArray[np.int32]:
    """For every reference the one before it in its request, -1 for the first."""
    before = np.empty_like(ids)
    before[1:] = ids[:-1]
    heads = offsets[:-1]
    before[heads[heads < offsets[1:]]] = -1
    return before


def _parents(ids: NDArray[np.int32], offsets: NDArray[np.int64]) -> NDArray[np.int32]:
    """Ids come in order of first appearance, so a first appearance is a new maximum."""
    highest = np.maximum.accumulate(ids)
    first = np.empty(len(ids), np.bool_)
    first[:1] = True
    np.greater(highest[1:], highest[:-1], out=first[1:])
    return _before(ids, offsets)[first]
