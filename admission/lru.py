"""Least recently used, leaf first: a request touches its chain from tail to head, so that of one
chain the tail is always the older, and among chains the one unused for longest goes first."""

from collections.abc import Callable

from .base import Chain, Key
from .leaf_first import LeafFirstOrder
from .leaf_queue import LeafQueue


class LruOrder(LeafFirstOrder):
    def __init__(self) -> None:
        super().__init__()
        self._queue = LeafQueue(self._forest)

    def touch(self, chain: Chain, stop: int) -> None:
        self._queue.touch(chain[:stop])

    def victim(self, busy: Callable[[Key], bool], worth: float | None = None) -> Key | None:
        return self._queue.oldest(busy)

    def coldest(self) -> Key | None:
        """About the key that goes first, None when nothing is here."""
        return self._queue.next_in_age()

    def check_integrity(self) -> None:
        super().check_integrity()
        self._queue.check_integrity()
        assert len(self._queue) == len(self)

    def _enter(self, key: Key) -> None:
        self._queue.push(key)

    def _leave(self, key: Key) -> None:
        self._queue.remove(key)

    def _bare(self, key: Key) -> None:
        self._queue.bare(key)
