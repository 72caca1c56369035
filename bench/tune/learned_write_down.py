"""What the default policy writes down to NVMe, and what makes room for it there, compiled: the
functions here have the names of those in cold_model.py that they stand for.
"""

import numpy as np
from numpy.typing import NDArray

from ...admission.jit import jit
from ...admission.learned.judge import worth_writing
from ...admission.learned.places import enter, index_of, leave
from ...admission.learned.records import NONE, Model, Place
from ...tiers.cleaner import CLEAN_SHARE
from .lanes import Dram, oldest_leaf
from .least_worth import least_worth


@jit
def finish_writes(model: Model, dram: Dram, nvme: Place, refused: NDArray[np.int64]) -> None:
    state = dram.state[0]
    target = max(1, state.capacity // CLEAN_SHARE)
    due = True
    while True:
        while due and state.queue_head == state.queue_end:
            ready = state.capacity - state.here + state.decided
            due = ready < target and decide_next(model, dram, nvme, refused)
        for at in range(state.num_writing):
            dram.seats[dram.writing[at]].writing = 0
        for at in range(state.num_leaving):
            dram.seats[dram.leaving[at]].leaving = 0
        state.num_writing = state.num_leaving = 0
        if state.queue_head == state.queue_end:
            state.queue_head = state.queue_end = 0
            return
        _go_on(model, dram, nvme)


@jit
def decide_next(model: Model, dram: Dram, nvme: Place, refused: NDArray[np.int64]) -> bool:
    row = oldest_leaf(dram, True, True)
    if row == NONE:
        return False
    size = 1
    parent = model.chunks[row].parent
    while parent != NONE and not nvme.chunks[parent].here and not dram.seats[parent].queued:
        size += 1
        parent = model.chunks[parent].parent
    path = np.empty(size, np.int32)
    for at in range(size - 1, -1, -1):
        path[at] = row
        row = model.chunks[row].parent
    stop = worth_writing(model, nvme, path, 0)
    refused[2] += size - stop
    for at in range(stop, size):
        _refuse(dram, path[at])
    if stop:
        worth = index_of(model, path[stop - 1])
        for at in range(stop):
            _queue(dram, path[at], worth)
        _go_on(model, dram, nvme)
    return True


@jit
def _queue(dram: Dram, row: int, worth: float) -> None:
    state, seat = dram.state[0], dram.seats[row]
    state.decided += 1 - seat.worthless
    seat.worthless, seat.queued = 0, 1
    dram.queue[state.queue_end], dram.worths[state.queue_end] = row, worth
    state.queue_end += 1


@jit
def _refuse(dram: Dram, row: int) -> None:
    seat = dram.seats[row]
    dram.state[0].decided += 1 - seat.worthless
    seat.worthless = 1


@jit
def _go_on(model: Model, dram: Dram, nvme: Place) -> None:
    state = dram.state[0]
    while state.queue_head < state.queue_end:
        row = int(dram.queue[state.queue_head])
        worth = float(dram.worths[state.queue_head])
        seat = dram.seats[row]
        if seat.leaving:
            return
        parent = model.chunks[row].parent
        reachable = parent == NONE or nvme.chunks[parent].here
        if reachable and _enter_nvme(model, dram, nvme, row, worth):
            seat.writing = seat.backed = 1
            dram.writing[state.num_writing] = row
            state.num_writing += 1
            state.written += 1
        else:
            seat.worthless = 1
        seat.queued = 0
        state.queue_head += 1
    state.queue_head = state.queue_end = 0


@jit
def _enter_nvme(model: Model, dram: Dram, nvme: Place, row: int, worth: float) -> bool:
    enter(model, nvme, row, model.chunks[row].parent)
    if nvme.sizes[0].here <= nvme.sizes[0].capacity:
        return True
    victim = least_worth(model, dram, nvme, worth, row, False)
    if victim == NONE:
        leave(model, nvme, row)
        return False
    leave(model, nvme, victim)
    state, seat = dram.state[0], dram.seats[victim]
    if seat.backed:
        seat.backed, seat.worthless = 0, 1
    seat.leaving = 1
    dram.leaving[state.num_leaving] = victim
    state.num_leaving += 1
    return True
