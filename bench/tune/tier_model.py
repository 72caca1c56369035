"""One tier of a replay: which chunks are in it, and the order in which it lets go of them."""

from collections.abc import Iterable
from itertools import takewhile

from ...admission.base import EvictionOrder, Key


class TierModel:
    """Holds at most `capacity` chunks; the caller makes room before it adds."""

    def __init__(self, capacity: int, order: EvictionOrder) -> None:
        self.capacity = capacity
        self.order = order
        self._parents: dict[Key, Key | None] = {}

    def add(self, key: Key, parent: Key | None) -> None:
        self._parents[key] = parent
        self.order.add(key, parent)

    def remove(self, key: Key) -> None:
        del self._parents[key]
        self.order.discard(key)

    def parent(self, key: Key) -> Key | None:
        """Of a chunk that is here."""
        return self._parents[key]

    def num_leading(self, keys: Iterable[Key]) -> int:
        """How many keys are here before the first that is not."""
        return len(list(takewhile(self._parents.__contains__, keys)))

    def num_of(self, keys: Iterable[Key]) -> int:
        """How many of the keys are here."""
        return sum(map(self._parents.__contains__, keys))

    def keys(self) -> set[Key]:
        return set(self._parents)

    @property
    def free(self) -> int:
        return self.capacity - len(self._parents)

    def __contains__(self, key: Key) -> bool:
        return key in self._parents

    def __len__(self) -> int:
        return len(self._parents)

    def check_integrity(self, hooks: set[Key]) -> None:
        """hooks: what chunks here may hang from."""
        self.order.check_integrity()
        assert len(self) == len(self.order) <= self.capacity
        assert all(key in self.order for key in self._parents)
        assert set(self._parents.values()) - {None} <= hooks, "a chunk hangs from nothing"
