"""The journey of requests through DRAM and NVMe under the default policy, compiled.

What it decides is what `replay.Replay` decides with a `Learned` policy, and so what a live store
decides, chunk by chunk; rows of arrays stand for the objects. Read replay.py first: the functions
here have the names of what they stand for.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ...admission.jit import jit
from ...admission.learned.history import observe
from ...admission.learned.judge import worth_of_missing
from ...admission.learned.places import enter, leave
from ...admission.learned.policy import (
    MAX_DRAM_SHARE,
    NOT_LIKELY,
    TOO_MANY,
    WORTH_LESS_IN_DRAM,
    most_ghosts,
)
from ...admission.learned.records import NONE, Model, Place, Rows, Table, new_model, new_place
from ...tiers.offers import WORTH_LESS
from .counts import TierCounts
from .lanes import Dram, new_dram
from .learned_two_tiers import serve_two_tiers
from .least_worth import least_worth
from .trace import Trace

_REPORT_REQUESTS = 1024
_REASONS = (
    f"into_dram: {WORTH_LESS}",
    f"into_dram: {TOO_MANY}",
    f"onto_nvme: {NOT_LIKELY}",
    f"nvme_to_dram: {WORTH_LESS_IN_DRAM}",
)


def replay_learned(
    trace: Trace, dram_chunks: int, nvme_chunks: int, progress: Callable[[int, int], None]
) -> TierCounts:
    """A store of two tiers, or of one when nvme_chunks is 0."""
    model = new_model(trace.distinct, most_ghosts(max(dram_chunks, nvme_chunks)))
    hits = np.zeros((2, trace.num_requests), np.int32)
    refused = np.zeros(len(_REASONS), np.int64)
    place = new_place(trace.distinct, nvme_chunks or dram_chunks)
    dram = new_dram(trace.distinct, dram_chunks)
    worth = np.zeros(int(np.diff(trace.offsets).max(initial=1)))
    run = serve_two_tiers if nvme_chunks else _one_tier
    for first in range(0, trace.num_requests, _REPORT_REQUESTS):
        last = min(first + _REPORT_REQUESTS, trace.num_requests)
        run(model, dram, place, worth, hits, refused, *_part(trace, first, last), first)
        progress(int(trace.offsets[last]), trace.refs)
    state = dram.state[0]
    return TierCounts(
        dram_hits=hits[0],
        nvme_hits=hits[1],
        plain_hits=int(hits.sum(dtype=np.int64)),
        chunk_writes=int(state["admitted"]),
        nvme_chunk_writes=int(state["written"]),
        promotions=int(state["promotions"]),
        wasted_promotions=int(state["wasted"]),
        refusals={
            reason: int(chunks) for reason, chunks in zip(_REASONS, refused, strict=True) if chunks
        },
    )


def _part(
    trace: Trace, first: int, last: int
) -> tuple[Rows, NDArray[np.int64], NDArray[np.float64]]:
    return trace.ids, trace.offsets[first : last + 1], trace.times_s[first:last]


@jit
def _one_tier(
    model: Model,
    dram: Dram,
    place: Place,
    worth: Table,
    hits: NDArray[np.int32],
    refused: NDArray[np.int64],
    ids: Rows,
    offsets: NDArray[np.int64],
    times_s: NDArray[np.float64],
    first: int,
) -> None:
    for request in range(len(times_s)):
        chain = ids[offsets[request] : offsets[request + 1]]
        model.now[0].forgotten = 0  # rows are not handed out again here
        if len(chain):
            observe(model, chain, times_s[request])
        held = 0
        while held < len(chain) and place.chunks[chain[held]].here:
            held += 1
        hits[0, first + request] = held
        if held < len(chain):
            _admit_by_worth(model, dram, place, worth, refused, chain, held)


@jit
def _admit_by_worth(
    model: Model,
    dram: Dram,
    place: Place,
    worth: Table,
    refused: NDArray[np.int64],
    chain: Rows,
    held: int,
) -> None:
    capacity = place.sizes[0].capacity
    most = max(1, int(MAX_DRAM_SHARE * capacity), capacity - place.sizes[0].here)
    stop = min(len(chain), held + most)
    refused[1] += len(chain) - stop
    worth_of_missing(model, chain, held, worth)
    if held:
        dram.seats[chain[held - 1]].pinned = 1
    end = held
    while end < stop:
        if place.sizes[0].here >= capacity:
            row = least_worth(model, dram, place, worth[end - held], NONE, True)
            if row == NONE:
                refused[0] += stop - end
                break
            leave(model, place, row)
        enter(model, place, chain[end], model.chunks[chain[end]].parent)
        dram.seats[chain[end]].pinned = 1
        end += 1
    for at in range(max(0, held - 1), end):
        dram.seats[chain[at]].pinned = 0
    dram.state[0].admitted += end - held
