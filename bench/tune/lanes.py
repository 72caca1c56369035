"""DRAM above NVMe in a compiled replay: LeafQueue's order of use, on arrays.

    numbered  oldest [ looked past: busy, or a parent that is parked ] newest
    ahead     oldest [ not looked at since it was touched .......... ] newest

Its victims are those of `admission.leaf_queue`, key by key; that module says why there are two.
"""

from typing import NamedTuple

import numpy as np

from ...admission.jit import jit
from ...admission.leaf_queue import PATIENCE
from ...admission.learned.records import NONE, Model, Records, Rows, Table

SEAT = np.dtype(
    [
        ("older", "i4"),
        ("newer", "i4"),
        ("kids", "i4"),  # children in DRAM
        ("here", "u1"),
        ("numbered", "u1"),
        ("parked", "u1"),
        ("pinned", "u1"),
        ("backed", "u1"),  # on NVMe, or on its way there
        ("writing", "u1"),
        ("queued", "u1"),  # to be written
        ("worthless", "u1"),
        ("reading", "u1"),  # to be staged from NVMe
        ("promoted", "u1"),  # and served nobody since
        ("leaving", "u1"),  # NVMe, as writes take its place
    ],
    align=True,
)
STATE = np.dtype(
    [
        ("capacity", "i8"),
        ("here", "i8"),
        ("staged", "i8"),
        ("decided", "i8"),  # backed, queued or worthless
        ("oldest", "i4"),
        ("newest", "i4"),
        ("oldest_numbered", "i4"),
        ("newest_numbered", "i4"),
        ("on_demand", "i8"),
        ("queue_head", "i8"),
        ("queue_end", "i8"),
        ("num_writing", "i8"),
        ("num_leaving", "i8"),
        ("written", "i8"),
        ("promotions", "i8"),
        ("wasted", "i8"),
        ("admitted", "i8"),
    ],
    align=True,
)


class Dram(NamedTuple):
    state: Records
    seats: Records
    passed: Rows
    parents: Rows
    queue: Rows
    """Chunks to be written, with what each is worth."""
    worths: Table
    writing: Rows
    leaving: Rows


def new_dram(num_chunks: int, capacity: int) -> Dram:
    state = np.zeros(1, STATE)
    state["capacity"] = capacity
    for end in ("oldest", "newest", "oldest_numbered", "newest_numbered"):
        state[end] = NONE
    few = min(num_chunks, capacity) + 1
    return Dram(
        state=state,
        seats=np.zeros(num_chunks, SEAT),
        passed=np.zeros(few, np.int32),
        parents=np.zeros(few, np.int32),
        queue=np.zeros(4 * few, np.int32),
        worths=np.zeros(4 * few),
        writing=np.zeros(4 * few, np.int32),
        leaving=np.zeros(4 * few, np.int32),
    )


@jit
def enter_dram(model: Model, dram: Dram, row: int) -> None:
    state, seat = dram.state[0], dram.seats[row]
    seat.here = 1
    state.here += 1
    parent = model.chunks[row].parent
    if parent != NONE:
        dram.seats[parent].kids += 1
    _push(dram, row)


@jit
def leave_dram(model: Model, dram: Dram, row: int) -> None:
    state, seat = dram.state[0], dram.seats[row]
    seat.here = 0
    state.here -= 1
    parent = model.chunks[row].parent
    if parent != NONE:
        dram.seats[parent].kids -= 1
        if dram.seats[parent].kids == 0:
            dram.seats[parent].parked = 0
    _unlink(dram, row)


@jit
def touch_dram(dram: Dram, row: int) -> None:
    _unlink(dram, row)
    _push(dram, row)


@jit
def coldest(dram: Dram) -> int:
    """LeafQueue.next_in_age()."""
    row = dram.state[0].oldest_numbered
    while row != NONE and dram.seats[row].parked:
        row = dram.seats[row].newer
    return int(dram.state[0].oldest if row == NONE else row)


@jit
def oldest_leaf(dram: Dram, to_decide: bool, late: bool) -> int:
    """LeafQueue.oldest() for the cleaner (to_decide) or for an eviction; NONE if there is none."""
    num_passed = num_parents = looked = 0
    found = NONE
    older, younger = dram.state[0].oldest_numbered, dram.state[0].oldest
    while True:
        while older != NONE and dram.seats[older].parked:
            older = dram.seats[older].newer
        if older != NONE:
            looked += 1
            if dram.seats[older].kids > 0:
                dram.parents[num_parents] = older
                num_parents += 1
            elif not _busy(dram.seats[older], to_decide, late):
                found = older
                break
            older = dram.seats[older].newer
            if looked <= PATIENCE:
                continue
        if younger != NONE:
            if dram.seats[younger].kids == 0 and not _busy(dram.seats[younger], to_decide, late):
                found = younger
                break
            dram.passed[num_passed] = younger
            num_passed += 1
            younger = dram.seats[younger].newer
        elif older == NONE:
            break
    if found != NONE:
        _settle(dram, num_parents, num_passed)
    return found


@jit
def _busy(seat: Records, to_decide: bool, late: bool) -> bool:
    if seat.pinned:
        return True
    if to_decide:
        return bool(seat.backed or seat.worthless or seat.queued)
    if not late or seat.worthless:
        return False
    return bool(not seat.backed or seat.writing)


@jit
def _settle(dram: Dram, num_parents: int, num_passed: int) -> None:
    for at in range(num_parents):
        dram.seats[dram.parents[at]].parked = 1
    state = dram.state[0]
    for at in range(num_passed):
        row = dram.passed[at]
        _unlink(dram, row)
        seat = dram.seats[row]
        seat.numbered, seat.parked = 1, seat.kids > 0
        seat.older, seat.newer = state.newest_numbered, NONE
        if state.newest_numbered == NONE:
            state.oldest_numbered = row
        else:
            dram.seats[state.newest_numbered].newer = row
        state.newest_numbered = row


@jit
def _push(dram: Dram, row: int) -> None:
    state, seat = dram.state[0], dram.seats[row]
    seat.numbered = seat.parked = 0
    seat.older, seat.newer = state.newest, NONE
    if state.newest == NONE:
        state.oldest = row
    else:
        dram.seats[state.newest].newer = row
    state.newest = row


@jit
def _unlink(dram: Dram, row: int) -> None:
    state, seat = dram.state[0], dram.seats[row]
    if seat.older != NONE:
        dram.seats[seat.older].newer = seat.newer
    elif seat.numbered:
        state.oldest_numbered = seat.newer
    else:
        state.oldest = seat.newer
    if seat.newer != NONE:
        dram.seats[seat.newer].older = seat.older
    elif seat.numbered:
        state.newest_numbered = seat.older
    else:
        state.newest = seat.older
