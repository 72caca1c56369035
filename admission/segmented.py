"""Segmented LRU (Karedla, Love and Wherry, IEEE Computer 1994), leaf first.

    new -> probation -- requested again --> protected
               ^                               |
               +------- its share is full -----+

Victims come from probation while there are any, so what a general stream brings in goes before
anything that was asked for again. What protected has no room for comes back as the youngest of
probation: it gets another round before it goes.
"""

from collections.abc import Callable

from .base import Chain, Key
from .leaf_first import LeafFirstOrder
from .leaf_queue import LeafQueue


class SegmentedOrder(LeafFirstOrder):
    """protected_share: of the resident chunks, at most this share is protected; 0 to 1.

    A chain that is requested is protected from its head on: a parent is touched after its child, so
    it is the younger and comes back to probation later.
    """

    def __init__(self, *, protected_share: float = 0.5) -> None:
        super().__init__()
        if not 0 <= protected_share <= 1:
            raise ValueError(f"protected_share is {protected_share}, must be from 0 to 1")
        self._protected_share = protected_share
        self._probation = LeafQueue(self._forest)
        self._protected = LeafQueue(self._forest)

    def is_protected(self, key: Key) -> bool:
        return key in self._protected

    def request(self, chain: Chain) -> None:
        for key in filter(self._probation.__contains__, reversed(chain)):
            self._probation.remove(key)
            self._protected.push(key)
        self._protected.touch(chain)
        self._shrink()

    def touch(self, chain: Chain, stop: int) -> None:
        used = chain[:stop]
        self._probation.touch(used)
        self._protected.touch(used)

    def victim(self, busy: Callable[[Key], bool], worth: float | None = None) -> Key | None:
        key = self._probation.oldest(busy)
        return self._protected.oldest(busy) if key is None else key

    def check_integrity(self) -> None:
        super().check_integrity()
        self._probation.check_integrity()
        self._protected.check_integrity()
        assert set(self._probation).isdisjoint(self._protected), "a key is in both segments"
        assert len(self._probation) + len(self._protected) == len(self)

    def _enter(self, key: Key) -> None:
        self._probation.push(key)

    def _leave(self, key: Key) -> None:
        (self._protected if key in self._protected else self._probation).remove(key)
        self._shrink()

    def _bare(self, key: Key) -> None:
        self._probation.bare(key)
        self._protected.bare(key)

    def _shrink(self) -> None:
        while len(self._protected) > self._protected_share * len(self):
            key = self._protected.next_in_age()
            if key is None:  # only parents are left whose children are on probation
                return
            self._protected.remove(key)
            self._probation.push(key)
