"""Leaves by rank, the lowest first.

Greedy-dual ageing (Young, Algorithmica 1994; with frequency, Cherkasova, HPL-98-69): a key is worth
its uses times its cost, counted from what the last victim was worth. What is not used stands still
while that level rises, so whatever was hot once is overtaken in time.
"""

from abc import abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable

from .base import Chain, Key
from .leaf_first import LeafFirstOrder

Rank = tuple[float, int]
"""What a key is worth, and when that was set: of equals the one unused for longest goes."""


class RankedOrder(LeafFirstOrder):
    """The leaves stand in a sorted list: there are as many as chains, far fewer than chunks."""

    def __init__(self) -> None:
        super().__init__()
        self._leaves: list[tuple[Rank, Key]] = []
        self._ranks: dict[Key, Rank] = {}
        self._uses: dict[Key, int] = {}
        self._level = 0.0
        self._clock = 0
        self._named: Key | None = None

    @abstractmethod
    def _cost(self, key: Key) -> float:
        """What a use of `key`, which is here, saves."""

    def request(self, chain: Chain) -> None:
        for key in filter(self._uses.__contains__, reversed(chain)):
            is_leaf = not self._forest.has_child(key)
            if is_leaf:
                self._unlist(key)
            self._uses[key] += 1
            self._rank(key)
            if is_leaf:
                self._list(key)

    def touch(self, chain: Chain, stop: int) -> None:
        """Uses are counted by request()."""

    def victim(self, busy: Callable[[Key], bool], worth: float | None = None) -> Key | None:
        self._named = next((key for _, key in self._leaves if not busy(key)), None)
        return self._named

    def check_integrity(self) -> None:
        super().check_integrity()
        leaves = [key for key in self._ranks if not self._forest.has_child(key)]
        assert self._leaves == sorted((self._ranks[key], key) for key in leaves)
        assert self._ranks.keys() == self._uses.keys()
        assert len(self._ranks) == len(self)

    def _rank(self, key: Key) -> None:
        self._clock += 1
        self._ranks[key] = (self._level + self._uses[key] * self._cost(key), self._clock)

    def _list(self, key: Key) -> None:
        insort(self._leaves, (self._ranks[key], key))

    def _unlist(self, key: Key) -> None:
        del self._leaves[bisect_left(self._leaves, (self._ranks[key], key))]

    def _enter(self, key: Key) -> None:
        parent = self._forest.parent(key)
        if parent in self._ranks and self._forest.is_only_child(key):
            self._unlist(parent)
        self._uses[key] = 1
        self._rank(key)
        if not self._forest.has_child(key):
            self._list(key)

    def _leave(self, key: Key) -> None:
        if key == self._named:
            self._level = max(self._level, self._ranks[key][0])
        if not self._forest.has_child(key):
            self._unlist(key)
        del self._ranks[key], self._uses[key]

    def _bare(self, key: Key) -> None:
        self._list(key)
