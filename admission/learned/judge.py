"""The learned answers: what a chunk must be worth to take a place, and what is worth a write."""

from ..jit import jit
from .hazard import age_bucket, reuse_chance
from .places import index_of, life
from .records import AGES, NONE, Model, Place, Rows, Table

MARGIN = 1.5
"""A newcomer must be worth so much more than what it displaces: what little is gained by less is
paid with many times the writes."""
WRITE_ABOVE = 0.25
"""Chance of use within a chunk's life on NVMe from which on it is written there."""
PROMOTE_ABOVE = 4.0
"""By how much a chunk on NVMe must be worth more than the one DRAM would lose first."""
SEEN_IN_HBM = 2


@jit
def worth_of_missing(model: Model, chain: Rows, start: int, worth: Table) -> None:
    """worth[i], for chain[start + i]: the most that may be displaced for it. A chunk is worth what
    any below it is, since they are of no use without it."""
    best = 0.0
    for at in range(len(chain) - 1, start - 1, -1):
        best = max(best, model.worth[model.chunks[chain[at]].klass, 0])
        worth[at - start] = best / MARGIN


@jit
def chance_on_nvme(model: Model, nvme: Place, row: int) -> float:
    """That a chunk is used while NVMe would keep it."""
    ticks = life(model, nvme)
    horizon = AGES - 1 if ticks == 0 else age_bucket(ticks)
    while model.chunks[row].follows and model.chunks[row].parent != NONE:
        row = model.chunks[row].parent
    chunk = model.chunks[row]
    return reuse_chance(model, chunk.klass, model.now[0].clock - chunk.last, horizon)


@jit
def worth_writing(model: Model, nvme: Place, chain: Rows, start: int) -> int:
    """Behind the last chunk of chain[start:] that is worth a write; `start` if there is none."""
    for at in range(len(chain) - 1, start - 1, -1):
        if chance_on_nvme(model, nvme, chain[at]) >= WRITE_ABOVE:
            return at + 1
    return start


@jit
def worth_promoting(model: Model, row: int, coldest: int) -> bool:
    """Whether a chunk that was read from NVMe is worth the place of the one DRAM loses first."""
    return index_of(model, row) > PROMOTE_ABOVE * index_of(model, coldest)
