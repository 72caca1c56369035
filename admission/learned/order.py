"""The order of a tier in which the chunk worth least goes."""

from collections.abc import Callable

from ..base import Chain, Key, Tier
from ..leaf_first import LeafFirstOrder
from .places import draw, enter_all, index_of, leave, lowest, lowest_index, pop_lowest
from .records import NONE, Place
from .rows import RowBook

DRAWS = 3
"""Before all leaves are looked at, since those that were drawn are busy."""


class WorthOrder(LeafFirstOrder):
    """Keeps one tier's place in the arrays as it is in the forest. Of the leaves in a draw, the one
    of least index goes first."""

    def __init__(self, book: RowBook, tier: Tier) -> None:
        super().__init__()
        self._book = book
        self._tier = tier
        self._entering: list[Key] = []  # in the forest already, not yet in the arrays

    def settle(self) -> None:
        """Bring the arrays up to date: a store adds many chunks at a time, and a call for each
        would cost more than all the rest. Whoever reads the arrays calls this before."""
        if self._entering:
            entering, self._entering = self._entering, []
            rows, parents = self._book.meet(entering, list(map(self._forest.parent, entering)))
            enter_all(self._book.model, self._book.places[self._tier], rows, parents)

    @property
    def _place(self) -> Place:
        self.settle()
        return self._book.places[self._tier]

    def touch(self, chain: Chain, stop: int) -> None:
        """What a request used is known from the request."""

    def victim(self, busy: Callable[[Key], bool], worth: float | None = None) -> Key | None:
        place, model, key = self._place, self._book.model, self._book.key
        for again in range(DRAWS):
            if again:
                draw(model, place)
            while (row := lowest(model, place)) != NONE:
                if worth is not None and lowest_index(place) >= worth:
                    return None
                if not busy(key(row)):
                    return key(row)
                pop_lowest(place)
        for row in place.leaves[: place.sizes[0]["leaves"]].tolist():  # nearly all are busy
            if not busy(key(row)) and (worth is None or index_of(model, row) < worth):
                return key(row)
        return None

    def discard(self, key: Key) -> None:
        self.settle()
        super().discard(key)

    def clear(self) -> None:
        """Everything leaves; the place is another order's."""
        for key in list(self._forest):
            self.discard(key)

    def check_integrity(self) -> None:
        super().check_integrity()
        place = self._place
        assert place.sizes[0]["here"] == len(self)
        leaves = set(place.leaves[: place.sizes[0]["leaves"]].tolist())
        found = {self._book.row(k) for k in self._forest if not self.has_child(k)}
        assert leaves == found, "leaves are not the keys without a child"

    def _enter(self, key: Key) -> None:
        self._entering.append(key)

    def _leave(self, key: Key) -> None:
        place = self._place
        row = self._book.row(key)
        parent = int(place.chunks["parent"][row])
        leave(self._book.model, place, row)
        self._book.release(row)
        if parent != NONE:
            self._book.release(parent)

    def _bare(self, key: Key) -> None:
        """The place has noticed."""
