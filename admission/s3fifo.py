"""S3-FIFO (Yang, Zhang, Qiu, Yue and Rashmi, SOSP 2023), leaf first: three queues, first in first
out.

    new -> small -- requested more than once --> main <-+
             |                                    |     | requested since: one chance less
             v                                    +-----+
           ghost -- comes back: straight into main
"""

from collections.abc import Callable

from .base import Chain, Key
from .ghost import GhostHistory
from .leaf_first import LeafFirstOrder
from .leaf_queue import LeafQueue
from .ungated import Ungated

MOST_CHANCES = 3
"""The paper's two bits."""
SMALL_SHARE = 10
"""One in so many resident chunks may be in small."""


class S3FifoOrder(LeafFirstOrder):
    """The ghost remembers as many keys as main may hold."""

    def __init__(self) -> None:
        super().__init__()
        self._small = LeafQueue(self._forest)
        self._main = LeafQueue(self._forest)
        self._ghost = GhostHistory(0)
        self._chances: dict[Key, int] = {}

    def request(self, chain: Chain) -> None:
        chances = self._chances
        for key in filter(chances.__contains__, chain):
            chances[key] = min(chances[key] + 1, MOST_CHANCES)

    def touch(self, chain: Chain, stop: int) -> None:
        """First in, first out: a use moves nothing."""

    def victim(self, busy: Callable[[Key], bool], worth: float | None = None) -> Key | None:
        while len(self._small) * SMALL_SHARE >= len(self):
            key = self._small.oldest(busy)
            if key is None:
                break
            if self._chances[key] <= 1:
                return key
            self._small.remove(key)
            self._to_main(key)
        return self._main_victim(busy) or self._small.oldest(busy)

    def check_integrity(self) -> None:
        super().check_integrity()
        self._small.check_integrity()
        self._main.check_integrity()
        assert set(self._small).isdisjoint(self._main), "a key is in both queues"
        assert len(self._small) + len(self._main) == len(self) == len(self._chances)
        assert not any(map(self._ghost.__contains__, self._chances)), "a resident key is a ghost"

    def _main_victim(self, busy: Callable[[Key], bool]) -> Key | None:
        while (key := self._main.oldest(busy)) is not None and self._chances[key]:
            self._chances[key] -= 1
            self._main.touch([key])
        return key

    def _to_main(self, key: Key) -> None:
        self._chances[key] = 0
        self._main.push(key)

    def _enter(self, key: Key) -> None:
        self._chances[key] = 0
        (self._main if key in self._ghost else self._small).push(key)
        self._ghost.discard(key)
        room = len(self) - len(self) // SMALL_SHARE
        self._ghost.limit = max(self._ghost.limit, room)

    def _leave(self, key: Key) -> None:
        if key in self._small:
            self._small.remove(key)
            self._ghost.remember(key)
        else:
            self._main.remove(key)
        del self._chances[key]

    def _bare(self, key: Key) -> None:
        self._small.bare(key)
        self._main.bare(key)


class S3Fifo(Ungated):
    def __init__(self) -> None:
        super().__init__(S3FifoOrder)
