"""One request after another through DRAM and NVMe under the default policy, compiled.

Read replay.py and cold_model.py first: the functions here have the names of theirs.
"""

import numpy as np
from numpy.typing import NDArray

from ...admission.jit import jit
from ...admission.learned.history import observe
from ...admission.learned.judge import worth_promoting
from ...admission.learned.policy import MAX_DRAM_SHARE
from ...admission.learned.records import NONE, Model, Place, Rows, Table
from ...tiers.cleaner import ON_DEMAND
from .lanes import Dram, coldest, enter_dram, leave_dram, oldest_leaf, touch_dram
from .learned_write_down import decide_next, finish_writes


@jit
def serve_two_tiers(
    model: Model,
    dram: Dram,
    nvme: Place,
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
        start = 0
        while True:
            stop, num_staged, whole = _load(model, dram, nvme, refused, chain, start)
            hits[0, first + request] += stop - start - num_staged
            hits[1, first + request] += num_staged
            if whole or stop == start:
                break
            start = stop
        _store(model, dram, nvme, refused, chain)
        finish_writes(model, dram, nvme, refused)


@jit
def _load(
    model: Model, dram: Dram, nvme: Place, refused: NDArray[np.int64], chain: Rows, start: int
) -> tuple[int, int, bool]:
    """(where the run ends, chunks of it that were staged, whether it ends for want of chunks)."""
    state = dram.state[0]
    staged_from = start
    while staged_from < len(chain) and dram.seats[chain[staged_from]].here:
        staged_from += 1
    held = _num_held(dram, nvme, chain)
    stop = held
    if staged_from < held:
        stop = _stage(model, dram, nvme, refused, chain, start, staged_from, held)
    _touch(dram, chain, stop)
    for at in range(start, stop):
        dram.seats[chain[at]].promoted = 0
    num_staged = state.staged
    if num_staged:
        first = staged_from
        free = state.capacity - state.here - state.staged
        state.staged = 0
        if free >= stop - first or _promotes(model, dram, chain[first]):
            for at in range(first, stop):
                if not dram.seats[chain[at]].here:
                    _enter_dram(model, dram, nvme, chain[at])
                    dram.seats[chain[at]].promoted = 1
                    state.promotions += 1
        else:
            refused[3] += stop - first
        for at in range(first, stop):
            dram.seats[chain[at]].reading = 0
    return stop, num_staged, stop == held


@jit
def _promotes(model: Model, dram: Dram, row: int) -> bool:
    cold = coldest(dram)
    return cold == NONE or worth_promoting(model, row, cold)


@jit
def _stage(
    model: Model,
    dram: Dram,
    nvme: Place,
    refused: NDArray[np.int64],
    chain: Rows,
    start: int,
    first: int,
    held: int,
) -> int:
    state = dram.state[0]
    state.on_demand = ON_DEMAND
    for at in range(start, held):
        dram.seats[chain[at]].pinned = dram.seats[chain[at]].here
    for at in range(first, held):
        dram.seats[chain[at]].reading = 1 - dram.seats[chain[at]].here
    stop = held
    at = first
    while at < stop:
        if dram.seats[chain[at]].here:
            at += 1
        elif _take_slot(model, dram, nvme, refused):
            state.staged += 1
            at += 1
        else:
            stop -= 1
            dram.seats[chain[stop]].pinned = 0
    for at in range(start, held):
        dram.seats[chain[at]].pinned = 0
        if at >= stop or dram.seats[chain[at]].here:
            dram.seats[chain[at]].reading = 0
    return stop


@jit
def _store(model: Model, dram: Dram, nvme: Place, refused: NDArray[np.int64], chain: Rows) -> None:
    held = _num_held(dram, nvme, chain)
    end = held
    if held < len(chain):
        state = dram.state[0]
        free = state.capacity - state.here
        most = max(1, int(MAX_DRAM_SHARE * state.capacity), free)
        stop = min(len(chain), held + most)
        refused[1] += len(chain) - stop
        if held and dram.seats[chain[held - 1]].here and not nvme.chunks[chain[held - 1]].here:
            dram.seats[chain[held - 1]].pinned = 1
        if held:
            dram.seats[chain[held - 1]].reading = 1  # stays on NVMe
        state.on_demand = ON_DEMAND
        while end < stop and _take_slot(model, dram, nvme, refused):
            _enter_dram(model, dram, nvme, chain[end])
            dram.seats[chain[end]].pinned = 1
            end += 1
        for at in range(max(0, held - 1), end):
            dram.seats[chain[at]].pinned = dram.seats[chain[at]].reading = 0
        state.admitted += end - held
    _touch(dram, chain, end)


@jit
def _num_held(dram: Dram, nvme: Place, chain: Rows) -> int:
    held = 0
    while held < len(chain):
        if not dram.seats[chain[held]].here and not nvme.chunks[chain[held]].here:
            break
        held += 1
    return held


@jit
def _touch(dram: Dram, chain: Rows, stop: int) -> None:
    for at in range(stop - 1, -1, -1):
        seat = dram.seats[chain[at]]
        if seat.here:
            touch_dram(dram, chain[at])
            if seat.worthless:
                seat.worthless = 0
                dram.state[0].decided -= 1


@jit
def _enter_dram(model: Model, dram: Dram, nvme: Place, row: int) -> None:
    enter_dram(model, dram, row)
    if nvme.chunks[row].here:
        dram.seats[row].backed = 1
        dram.state[0].decided += 1


@jit
def _take_slot(model: Model, dram: Dram, nvme: Place, refused: NDArray[np.int64]) -> bool:
    state = dram.state[0]
    if state.here + state.staged < state.capacity:
        return True
    row = oldest_leaf(dram, False, True)
    while row == NONE:
        state.on_demand -= 1
        if state.on_demand < 0 or not decide_next(model, dram, nvme, refused):
            return False
        row = oldest_leaf(dram, False, True)
    leave_dram(model, dram, row)
    seat = dram.seats[row]
    state.decided -= seat.backed + seat.worthless
    state.wasted += seat.promoted
    seat.backed = seat.worthless = seat.promoted = 0
    return True
