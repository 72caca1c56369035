"""Least recently used, leaf first, with everything admitted: what any policy is compared with.

A request touches its chain from tail to head, so a chunk is always older than the one before it in
its chain: what is least recently used is a leaf, and what is resident is prefix-closed.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...admission.jit import jit
from .trace import Trace


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Counts:
    """What one tier did with a trace; in chunks.

    hits: int32, by request: its leading run of chunks that were resident when it arrived.
    chunk_writes: chunks that became resident, each time they did.
    """

    hits: NDArray[np.int32]
    chunk_writes: int

    @property
    def prefix_hits(self) -> int:
        return int(self.hits.sum(dtype=np.int64))

    @property
    def prefix_hits_last_half(self) -> int:
        """Of the requests from num_requests // 2 on."""
        return int(self.hits[len(self.hits) // 2 :].sum(dtype=np.int64))

    @property
    def plain_hits(self) -> int:
        """Resident chunks anywhere in a request: the same, as both bounds are prefix-closed."""
        return self.prefix_hits


def replay_lru(trace: Trace, capacity_chunks: int) -> Counts:
    """Hits are counted as a request arrives; then it takes a slot for each chunk that it misses.

    A request never evicts its own chunks: of one longer than the tier only the head gets in.
    """
    if capacity_chunks < 0:
        raise ValueError(f"capacity_chunks is {capacity_chunks}: must be at least 0")
    hits = _lru_hits(trace.ids, trace.offsets, trace.distinct, capacity_chunks)
    kept = np.minimum(np.diff(trace.offsets), capacity_chunks)
    return Counts(hits=hits, chunk_writes=int((kept - hits).sum()))


@jit
def _lru_hits(
    ids: NDArray[np.int32], offsets: NDArray[np.int64], distinct: int, capacity: int
) -> NDArray[np.int32]:
    """The trace itself is the queue: its references, with each request turned tail first, are the
    touches in order of time, and one is current while it is the last of its chunk.

        evicted or touched again  |  resident, where current  |  not seen yet
                                  ^oldest                     ^now
    """
    hits = np.zeros(len(offsets) - 1, np.int32)
    last_touch = np.full(distinct, -1, np.int64)  # by chunk; its place among all touches
    oldest, request_of_oldest, num_resident = 0, 0, 0
    for request in range(len(offsets) - 1):
        head, stop = offsets[request], offsets[request + 1]
        miss = head
        while miss < stop and last_touch[ids[miss]] >= oldest:
            miss += 1
        hits[request] = miss - head
        num_resident += stop - miss
        for i in range(head, stop):
            last_touch[ids[i]] = head + stop - 1 - i
        while num_resident > capacity:
            while oldest == offsets[request_of_oldest + 1]:
                request_of_oldest += 1
            head, stop = offsets[request_of_oldest], offsets[request_of_oldest + 1]
            if last_touch[ids[head + stop - 1 - oldest]] == oldest:
                num_resident -= 1
            oldest += 1
    return hits
