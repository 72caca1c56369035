"""ARC, the adaptive replacement cache (Megiddo and Modha, FAST 2003), leaf first.

    T1  requested once since it came       B1  left T1 not long ago
    T2  requested again                    B2  left T2 not long ago

A request for a key in B1 says that T1 is too small, one for a key in B2 that T2 is: `p`, the size
that T1 aims at, follows. The names are the paper's; c is the most chunks that ever were resident.
"""

from collections.abc import Callable

from .base import Chain, Key
from .ghost import GhostHistory
from .leaf_first import LeafFirstOrder
from .leaf_queue import LeafQueue
from .ungated import Ungated


class ArcOrder(LeafFirstOrder):
    def __init__(self) -> None:
        super().__init__()
        self._t1, self._t2 = LeafQueue(self._forest), LeafQueue(self._forest)
        self._b1, self._b2 = GhostHistory(0), GhostHistory(0)
        self._c = 0
        self._p = 0.0
        self._from_b2 = False  # the request under way wants a key of B2

    def request(self, chain: Chain) -> None:
        self._from_b2 = False
        for key in reversed(chain):
            if key in self._t1:
                self._t1.remove(key)
                self._t2.push(key)
            elif key in self._b1:
                self._p = min(self._p + max(1.0, len(self._b2) / len(self._b1)), self._c)
            elif key in self._b2:
                self._p = max(self._p - max(1.0, len(self._b1) / len(self._b2)), 0.0)
                self._from_b2 = True
        self._t2.touch(chain)

    def touch(self, chain: Chain, stop: int) -> None:
        used = chain[:stop]
        self._t1.touch(used)
        self._t2.touch(used)

    def victim(self, busy: Callable[[Key], bool], worth: float | None = None) -> Key | None:
        size = len(self._t1)
        from_t1 = size > self._p or (self._from_b2 and size == self._p)
        first, second = (self._t1, self._t2) if from_t1 else (self._t2, self._t1)
        key = first.oldest(busy)
        return second.oldest(busy) if key is None else key

    def check_integrity(self) -> None:
        super().check_integrity()
        self._t1.check_integrity()
        self._t2.check_integrity()
        parts = (set(self._t1), set(self._t2))
        assert parts[0].isdisjoint(parts[1]), "a key is in T1 and in T2"
        assert len(self._t1) + len(self._t2) == len(self) <= self._c
        assert not any(key in self._b1 or key in self._b2 for part in parts for key in part)
        assert 0 <= self._p <= self._c
        assert len(self._b1) + len(self._b2) <= 2 * self._c

    def _enter(self, key: Key) -> None:
        self._c = max(self._c, len(self))
        self._b1.limit = self._b2.limit = 2 * self._c
        if key in self._b1 or key in self._b2:
            self._b1.discard(key)
            self._b2.discard(key)
            self._t2.push(key)
        else:
            self._t1.push(key)
            self._trim()

    def _leave(self, key: Key) -> None:
        if key in self._t1:
            self._t1.remove(key)
            self._b1.remember(key)
        else:
            self._t2.remove(key)
            self._b2.remember(key)

    def _bare(self, key: Key) -> None:
        self._t1.bare(key)
        self._t2.bare(key)

    def _trim(self) -> None:
        """T1 and B1 hold at most c keys, all four lists 2c."""
        while self._b1 and len(self._t1) + len(self._b1) > self._c:
            self._b1.forget_oldest()
        while self._b2 and len(self) + len(self._b1) + len(self._b2) > 2 * self._c:
            self._b2.forget_oldest()


class Arc(Ungated):
    def __init__(self) -> None:
        super().__init__(ArcOrder)
