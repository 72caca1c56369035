"""Greedy-dual-size-frequency (Cherkasova, HPL-98-69), leaf first. Chunks are of one size, so what
is left of it is frequency times cost, and the cost is the prefill that a use saves."""

from .base import Chain, Key
from .ranked import RankedOrder
from .ungated import Ungated

DEPTH_OF_DOUBLE_COST = 128
"""Chunks before a chunk at which attending to them costs as much as all the rest of its prefill:
30k tokens for an 8B model; it takes more for a larger one."""


class GdsfOrder(RankedOrder):
    """A chunk's depth is known from its parent where that is here, and from the next request."""

    def __init__(self) -> None:
        super().__init__()
        self._depths: dict[Key, int] = {}

    def request(self, chain: Chain) -> None:
        for depth, key in enumerate(chain):
            if key in self._depths:
                self._depths[key] = depth
        super().request(chain)

    def _cost(self, key: Key) -> float:
        return 1 + self._depths[key] / DEPTH_OF_DOUBLE_COST

    def _enter(self, key: Key) -> None:
        parent = self._forest.parent(key)
        self._depths[key] = 0 if parent is None else self._depths.get(parent, -1) + 1
        super()._enter(key)

    def _leave(self, key: Key) -> None:
        super()._leave(key)
        del self._depths[key]


class Gdsf(Ungated):
    def __init__(self) -> None:
        super().__init__(GdsfOrder)
