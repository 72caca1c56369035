"""WorthOrder's victims in a compiled replay, where flags of a chunk say what must stay."""

from ...admission.jit import jit
from ...admission.learned.order import DRAWS
from ...admission.learned.places import draw, index_of, lowest, lowest_index, pop_lowest
from ...admission.learned.records import NONE, Model, Place
from .lanes import Dram


@jit
def least_worth(
    model: Model, dram: Dram, place: Place, worth: float, newcomer: int, in_dram: bool
) -> int:
    """WorthOrder.victim(): of DRAM by itself (in_dram), or of NVMe for `newcomer`."""
    for again in range(DRAWS):
        if again:
            draw(model, place)
        while True:
            row = lowest(model, place)
            if row == NONE:
                break
            if lowest_index(place) >= worth:
                return NONE
            if not _must_stay(dram, row, newcomer, in_dram):
                return row
            pop_lowest(place)
    for leaf in range(place.sizes[0].leaves):
        row = place.leaves[leaf]
        if not _must_stay(dram, row, newcomer, in_dram) and index_of(model, row) < worth:
            return int(row)
    return NONE


@jit
def _must_stay(dram: Dram, row: int, newcomer: int, in_dram: bool) -> bool:
    seat = dram.seats[row]
    if in_dram:
        return bool(seat.pinned)
    return bool(row == newcomer or seat.writing or seat.reading or (seat.kids and not seat.here))
