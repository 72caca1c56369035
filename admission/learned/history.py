"""What a request tells: at which ages its chunks were used again, and their classes from now on.

A chunk is tracked while it is in a tier, and afterwards as a ghost, a bounded number of them.
"""

import math

from ..jit import jit
from .hazard import (
    EDGES,
    REFIT_EVERY,
    age_bucket,
    class_of,
    forget_a_little,
    refit,
    use_class,
)
from .records import AGES, LOG_ENTRIES, NONE, Model, Rows

TIMED = 0.75
"""Of the clock's speed, so much is time at the mean rate of requests, the rest is requests: ages go
on when traffic stops, and a clock of either alone predicts worse."""
MEAN_OVER = 4096.0
"""Gaps between requests that the mean rate is taken over."""


@jit
def observe(model: Model, chain: Rows, now_s: float) -> None:
    """A request with this chain arrived. Chunks it names for the first time get tracked."""
    _tick(model, now_s)
    _walk_log(model)
    known = 0
    while known < len(chain) and model.chunks[chain[known]].tracked:
        known += 1
    turn = 0 if known == 0 else min(3, model.chunks[chain[known - 1]].turn + 1)
    for at in range(len(chain) - 1, -1, -1):  # a head outlives its tail among the ghosts
        parent = chain[at - 1] if at else NONE
        gap = _use(model, chain[at], parent, turn)
        chunk = model.chunks[chain[at]]
        tail = at == len(chain) - 1
        chunk.klass = class_of(tail, chunk.touches, chunk.turn, len(chain) - known, gap)
        use_class(model, chunk.klass)
    _sample(model, chain)
    model.now[0].requests += 1
    if model.now[0].requests % REFIT_EVERY == 0:
        forget_a_little(model)
        refit(model)


@jit
def became_ghost(model: Model, row: int) -> None:
    """A tracked chunk is in no tier any more."""
    now, chunk = model.now[0], model.chunks[row]
    chunk.ghost = 1
    chunk.older, chunk.newer = now.newest, NONE
    if now.newest == NONE:
        now.oldest = row
    else:
        model.chunks[now.newest].newer = row
    now.newest = row
    now.ghosts += 1
    if now.ghosts > now.most_ghosts:
        forget(model, now.oldest)


@jit
def no_ghost(model: Model, row: int) -> None:
    """Out of the ghosts: it came into a tier, or moves to their newest end."""
    now, chunk = model.now[0], model.chunks[row]
    if chunk.older == NONE:
        now.oldest = chunk.newer
    else:
        model.chunks[chunk.older].newer = chunk.newer
    if chunk.newer == NONE:
        now.newest = chunk.older
    else:
        model.chunks[chunk.newer].older = chunk.older
    chunk.ghost = 0
    now.ghosts -= 1


@jit
def forget(model: Model, row: int) -> None:
    """Stop tracking a ghost: its row may be given to another chunk."""
    no_ghost(model, row)
    chunk = model.chunks[row]
    chunk.tracked = 0
    _close_sample(model, row)
    model.forgotten[model.now[0].forgotten] = row
    model.now[0].forgotten += 1


@jit
def _tick(model: Model, now_s: float) -> None:
    now = model.now[0]
    ticks = 1.0
    if now.requests > 0:
        gap_s = max(0.0, now_s - now.time_s)
        if now.gaps >= 32 and now.gaps_s > 0:
            mean_s = now.gaps_s / now.gaps
            ticks = 1 - TIMED + TIMED * gap_s / mean_s
            gap_s = min(gap_s, 1000 * mean_s)  # a night is no sign of slower days
        keep = 1 - 1 / MEAN_OVER
        now.gaps = now.gaps * keep + 1
        now.gaps_s = now.gaps_s * keep + gap_s
    now.time_s = now_s
    now.clock += ticks


@jit
def _walk_log(model: Model) -> None:
    """Every sample that reached another age bucket unused was exposed to that bucket's hazard."""
    now = model.now[0]
    for age in range(AGES):
        entry = max(model.walked[age], now.logged - LOG_ENTRIES)
        while entry < now.logged:
            sample = model.log[entry % LOG_ENTRIES]
            if now.clock - sample.time < EDGES[age]:
                break
            if sample.alive:
                model.exposure[sample.klass, age] += sample.weight
            entry += 1
        model.walked[age] = entry


@jit
def _use(model: Model, row: int, parent: int, turn: int) -> float:
    """Count a use; returns the clock since the one before, 0 for the first."""
    clock, chunk = model.now[0].clock, model.chunks[row]
    gap = 0.0
    if chunk.tracked:
        gap = clock - chunk.last
        entry = chunk.entry
        if entry != NONE and entry >= model.now[0].logged - LOG_ENTRIES:
            sample = model.log[entry % LOG_ENTRIES]
            model.events[sample.klass, age_bucket(gap)] += sample.weight
        _close_sample(model, row)
        chunk.touches = min(255, chunk.touches + 1)
        if chunk.ghost:
            no_ghost(model, row)
    else:
        chunk.tracked, chunk.follows, chunk.touches = 1, 0, 1
        chunk.turn, chunk.parent = turn, parent
    if not chunk.places:
        became_ghost(model, row)
    chunk.last = clock
    return gap


@jit
def _close_sample(model: Model, row: int) -> None:
    chunk = model.chunks[row]
    if chunk.entry != NONE and chunk.entry >= model.now[0].logged - LOG_ENTRIES:
        model.log[chunk.entry % LOG_ENTRIES].alive = 0
    chunk.entry = NONE


@jit
def _sample(model: Model, chain: Rows) -> None:
    """Of each run of equal class the deepest chunk stands for all: they share one fate, so they
    count more than one, and less than each by itself."""
    now = model.now[0]
    end = len(chain) - 1
    while end >= 0:
        klass = model.chunks[chain[end]].klass
        start = end
        while start >= 0 and model.chunks[chain[start]].klass == klass:
            start -= 1
        sample = model.log[now.logged % LOG_ENTRIES]
        sample.time, sample.klass, sample.alive = now.clock, klass, 1
        sample.weight = math.sqrt(end - start)
        model.chunks[chain[end]].entry = now.logged
        now.logged += 1
        end = start
