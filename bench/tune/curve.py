"""Hits of leaf-first LRU at every capacity, from one pass.

R. L. Mattson et al., "Evaluation techniques for storage hierarchies", IBM Systems Journal 9(2),
1970: LRU of any capacity holds the chunks on top of one and the same stack, so a reference hits
where the capacity is at least its stack distance, the chunk's place counted from 1. The count of
what lies above is kept in a tree (P. M. Fenwick, "A new data structure for cumulative frequency
tables", Software: Practice and Experience 24(3), 1994), here per request, not per chunk: what a
request used last is one stretch of its chain, and the distances along a run are consecutive.
"""

import numpy as np
from numpy.typing import NDArray

from ...admission.jit import jit
from .reuse import reuse_runs
from .trace import Trace


def lru_curve(trace: Trace) -> NDArray[np.int64]:
    """int64, by capacity in chunks from 0 to trace.distinct: the prefix hits of the whole trace.

    The last is what an unlimited tier hits. Equal to replay_lru at every capacity.
    """
    runs = reuse_runs(trace)
    steps = _distance_steps(
        runs.request, runs.previous, runs.start, runs.stop, np.diff(trace.offsets), trace.distinct
    )
    return np.cumsum(np.cumsum(steps))[:-1]


def knee(curve: NDArray[np.int64], share: float = 0.95) -> int:
    """The smallest capacity, in chunks, that has at least this share of all possible hits."""
    return int(np.searchsorted(curve, share * curve[-1]))


def slope_past(curve: NDArray[np.int64], capacity_chunks: int) -> int:
    """Hits that twice the capacity would add."""
    last = len(curve) - 1
    return int(curve[min(2 * capacity_chunks, last)] - curve[min(capacity_chunks, last)])


@jit
def _distance_steps(
    request_of: NDArray[np.int32],
    previous: NDArray[np.int32],
    start: NDArray[np.int32],
    stop: NDArray[np.int32],
    num_chunks: NDArray[np.int64],
    distinct: int,
) -> NDArray[np.int64]:
    """By stack distance: how many more references have it than have the distance before it."""
    steps = np.zeros(distinct + 2, np.int64)
    last_used = np.zeros(len(num_chunks) + 1, np.int64)  # a Fenwick tree of chunks by last request
    total, run = 0, 0
    for request in range(len(num_chunks)):
        while run < len(request_of) and request_of[run] == request:
            # Above a run lie the chunks used since, without the start[run] that are in this chain
            # and were just taken out, then those, then the run itself from its head.
            since = total - _count_through(last_used, previous[run])
            steps[since + start[run] + 1] += 1
            steps[since + stop[run] + 1] -= 1
            _add(last_used, previous[run], start[run] - stop[run])
            total -= stop[run] - start[run]
            run += 1
        _add(last_used, request, num_chunks[request])
        total += num_chunks[request]
    return steps


@jit
def _add(tree: NDArray[np.int64], index: int, amount: int) -> None:
    node = index + 1
    while node < len(tree):
        tree[node] += amount
        node += node & -node


@jit
def _count_through(tree: NDArray[np.int64], index: int) -> int:
    """The sum of entries 0 to index, both included."""
    count, node = 0, index + 1
    while node > 0:
        count += tree[node]
        node &= node - 1
    return count
