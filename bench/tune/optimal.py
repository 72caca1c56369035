"""The most hits that any policy could get, knowing the future: Belady's MIN with bypass.

L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems
Journal 5(2), 1966: evict what is used again furthest in the future; with bypass, what is missed may
be that itself and stays outside. The references of a request count head first, so a chunk's next
use comes after that of the chunk before it: the victim is always a leaf, and what is resident is
prefix-closed. No online policy has more prefix hits, nor more plain ones.

What is resident and next used by one and the same request is one stretch of that request's chain
(see `reuse`), cut only at its end. So a tier is one stretch per future request, the furthest of
them gives way, and a request hits the stretch that waits for it.
"""

from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from ...admission.jit import jit
from .lru import Counts
from .reuse import reuse_runs
from .trace import Trace


def replay_optimal(trace: Trace, capacity_chunks: int) -> Counts:
    """Chunks that never come back are not admitted, even where there is room."""
    if capacity_chunks < 0:
        raise ValueError(f"capacity_chunks is {capacity_chunks}: must be at least 0")
    runs = reuse_runs(trace)
    by_previous = np.argsort(runs.previous, kind="stable")  # then by request, hence by start
    ends = np.searchsorted(runs.previous[by_previous], np.arange(trace.num_requests), "right")
    hits = np.zeros(trace.num_requests, np.int32)
    chunk_writes = _replay(
        ends,
        runs.request[by_previous],
        runs.start[by_previous],
        runs.stop[by_previous],
        capacity_chunks,
        hits,
    )
    return Counts(hits=hits, chunk_writes=chunk_writes)


@jit
def _replay(
    ends: NDArray[np.int64],
    next_request: NDArray[np.int32],
    start: NDArray[np.int32],
    stop: NDArray[np.int32],
    capacity: int,
    hits: NDArray[np.int32],
) -> int:
    """Fills in hits, by request; returns the chunks admitted.

    Runs up to ends[r] and from ends[r - 1] on are the chunks of request r that come back, head
    first: [start, stop) of its chain is next used by next_request.
    """
    low = np.zeros(len(hits), np.int32)  # [low, high) of the chain of a request to come is resident
    high = np.zeros(len(hits), np.int32)
    waiting = [0]  # every request with a stretch, negated: a heap, furthest first
    waiting.pop()
    free, chunk_writes, run = capacity, 0, 0
    for request in range(len(hits)):
        held = high[request] - low[request]
        assert held == 0 or low[request] == 0, "what is resident is not prefix-closed"
        hits[request] = held
        free += held
        low[request] = high[request] = 0
        while run < ends[request]:  # once one gets less than it wants, those after it get nothing
            later = next_request[run]
            wanted = stop[run] - start[run]
            while free < wanted and waiting and -waiting[0] > later:
                furthest = -waiting[0]
                given_up = min(high[furthest] - low[furthest], wanted - free)
                high[furthest] -= given_up
                free += given_up
                if low[furthest] == high[furthest]:
                    heappop(waiting)
            got = min(wanted, free)
            free -= got
            chunk_writes += got - min(max(held - start[run], 0), got)  # a hit stays where it is
            if got and low[later] < high[later]:
                assert got == wanted, "a chunk was resident without the one before it"
                assert low[later] == stop[run], "a stretch has a hole"
                low[later] = start[run]
            elif got:
                low[later], high[later] = start[run], start[run] + got
                heappush(waiting, -later)
            run += 1
    return chunk_writes
