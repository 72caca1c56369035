"""What every order has in common: a forest, and a place for each key that comes and goes."""

from abc import abstractmethod

from .base import Chain, EvictionOrder, Key
from .forest import Forest


class LeafFirstOrder(EvictionOrder):
    """An order over a forest; subclasses say where a key stands among the leaves."""

    def __init__(self) -> None:
        self._forest = Forest()

    def request(self, chain: Chain) -> None:
        """A request with this chain arrived: told once per request, before it adds or touches.

        What counts uses counts them here: one request touches its chain several times, when it
        loads, when it stores, and with every chunk it generates.
        """

    def add(self, key: Key, parent: Key | None) -> None:
        if self._forest.add(key, parent):
            self._enter(key)

    def discard(self, key: Key) -> None:
        if key not in self._forest:
            return
        bared = self._forest.discard(key)
        self._leave(key)
        if bared is not None and bared in self._forest:
            self._bare(bared)

    def descendants(self, key: Key) -> list[Key]:
        return self._forest.descendants(key)

    def has_child(self, key: Key) -> bool:
        return self._forest.has_child(key)

    def __contains__(self, key: object) -> bool:
        return key in self._forest

    def __len__(self) -> int:
        return len(self._forest)

    def check_integrity(self) -> None:
        self._forest.check_integrity()

    @abstractmethod
    def _enter(self, key: Key) -> None:
        """`key` is in the forest now and gets its place."""

    @abstractmethod
    def _leave(self, key: Key) -> None:
        """`key` is out of the forest and loses its place."""

    @abstractmethod
    def _bare(self, key: Key) -> None:
        """The last child of `key`, which is here, has gone: it is a leaf again."""
