"""Where a trace comes back to chunks: as runs, not chunk by chunk.

A request that uses a chunk uses everything before it in its chain, too. So along a chain, head
first, the last request that used a chunk can only lie further back, and the chunks that were last
used by one and the same request lie side by side, at the same places in both chains:

    request 7   [ used by 6 )[ by 6 )[  by 4  )[ by 0 )[ never before )
                                     ^start    ^stop     one run: 4 comes back in 7

The same run, seen from request 4, is what is next used by 7: exact bounds need nothing else, and
there are a few runs to a request where there are hundreds of chunks.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...admission.jit import jit
from .trace import Trace


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ReuseRuns:
    """All int32, one entry per run; ascending by request, then by start.

    Chunks [start, stop) of the chain of `request` were last used by `previous`, an earlier one.
    Chunks of a request beyond its last run are new.
    """

    request: NDArray[np.int32]
    previous: NDArray[np.int32]
    start: NDArray[np.int32]
    stop: NDArray[np.int32]


def reuse_runs(trace: Trace) -> ReuseRuns:
    """One pass over the references."""
    # As many rows as there could be runs; memory that is never written to is never taken.
    rows = np.empty((trace.refs, 4), np.int32)
    num_runs = _find_runs(trace.ids, trace.offsets, trace.distinct, rows)
    request, previous, start, stop = np.ascontiguousarray(rows[:num_runs].T)
    return ReuseRuns(request=request, previous=previous, start=start, stop=stop)


@jit
def _find_runs(
    ids: NDArray[np.int32], offsets: NDArray[np.int64], distinct: int, rows: NDArray[np.int32]
) -> int:
    last_request = np.full(distinct, -1, np.int32)
    num_runs = 0
    for request in range(len(offsets) - 1):
        head, stop = offsets[request], offsets[request + 1]
        start = i = head
        while i < stop and last_request[ids[i]] >= 0:
            previous = last_request[ids[i]]
            while i < stop and last_request[ids[i]] == previous:
                last_request[ids[i]] = request
                i += 1
            rows[num_runs, 0] = request
            rows[num_runs, 1] = previous
            rows[num_runs, 2] = start - head
            rows[num_runs, 3] = i - head
            num_runs += 1
            start = i
        for new in range(i, stop):
            last_request[ids[new]] = request
    return num_runs
