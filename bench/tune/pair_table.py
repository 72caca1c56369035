"""A hash table from pairs of numbers to numbers, in arrays that compiled code can use."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...admission.jit import jit

Columns = tuple[NDArray[np.int64], NDArray[np.uint64], NDArray[np.int32]]
"""By slot: left and right of the pair, and its value; value 0 is an empty slot."""


class PairTable:
    """Open addressing, at most half full. Whoever fills it says so in `size`, after reserve()."""

    def __init__(self) -> None:
        self.columns = _empty(1024)
        self.size = 0

    def reserve(self, more: int) -> None:
        """Make room for that many more pairs."""
        room = len(self.columns[2])
        need = 2 * (self.size + more)
        if need > room:
            old, self.columns = self.columns, _empty(1 << (need - 1).bit_length())
            move(old, self.columns)


def _empty(room: int) -> Columns:
    return np.empty(room, np.int64), np.empty(room, np.uint64), np.zeros(room, np.int32)


@jit
def find(columns: Columns, left: int, right: np.uint64) -> int:
    """The slot of a pair, or the empty one where it belongs.

    The mix is the finalizer of SplitMix64 (Steele, Lea and Flood, 2014), so that ids which follow
    each other do not fall into one row of slots.
    """
    lefts, rights, values = columns
    mixed = right ^ (np.uint64(left) * np.uint64(0x9E3779B97F4A7C15))
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mask = len(values) - 1
    slot = int(np.int64((mixed ^ (mixed >> np.uint64(31))) & np.uint64(mask)))
    while values[slot] != 0 and (lefts[slot] != left or rights[slot] != right):
        slot = (slot + 1) & mask
    return slot


@jit
def move(old: Columns, new: Columns) -> None:
    for i in range(len(old[2])):
        if old[2][i] != 0:
            slot = find(new, old[0][i], old[1][i])
            new[0][slot], new[1][slot], new[2][slot] = old[0][i], old[1][i], old[2][i]
