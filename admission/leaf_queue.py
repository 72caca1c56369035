"""Keys from oldest to youngest, of which the oldest leaf is wanted that nobody is busy with.

    oldest  [ aside ......... ][ ahead ........................ ]  youngest
              looked at and      not looked at since last touched
              then busy

Different callers pass over different keys: who evicts passes over what is not written down yet,
who writes down ahead of eviction passes over what is. A crowd aside may be all that one of them
passes over, so after some patience both lanes are looked through in step, and neither caller walks
over all that the other wants. Passing over a key never changes its age.
"""

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain as concat
from itertools import islice, zip_longest

from .base import Key
from .forest import Forest

PATIENCE = 64
"""Keys aside that are looked at in their order before any ahead is."""


class LeafQueue:
    """Some of the keys of `forest`, which says what a leaf is and is kept by the owner."""

    def __init__(self, forest: Forest) -> None:
        self._forest = forest
        self._ahead: OrderedDict[Key, None] = OrderedDict()
        self._numbers: dict[Key, int] = {}  # of keys that are ahead no more: lower is older
        self._next_number = 0
        self._aside: list[tuple[int, Key]] = []
        self._parked: set[Key] = set()  # the others with a number: parents, until bare()

    def push(self, key: Key) -> None:
        """`key` comes in as the youngest."""
        self._ahead[key] = None

    def remove(self, key: Key) -> None:
        """`key` is in here and leaves."""
        if key in self._ahead:
            del self._ahead[key]
            return
        number = self._numbers.pop(key)
        if key in self._parked:
            self._parked.remove(key)
        else:
            del self._aside[bisect_left(self._aside, (number, key))]

    def touch(self, keys: Sequence[Key]) -> None:
        """Of these, those in here become the youngest; the first of `keys` of all."""
        if not self._numbers.keys().isdisjoint(keys):
            for key in self._numbers.keys() & set(keys):
                self.remove(key)
                self.push(key)
        here = filter(self._ahead.__contains__, reversed(keys))
        deque(map(self._ahead.move_to_end, here), maxlen=0)  # a loop at C's speed

    def bare(self, key: Key) -> None:
        """The last child of `key` has gone: a parent whose turn had come stands in its place."""
        if key in self._parked:
            self._parked.remove(key)
            insort(self._aside, (self._numbers[key], key))

    def oldest(self, busy: Callable[[Key], bool]) -> Key | None:
        """The oldest leaf that is not busy, or None; it stays in here."""
        has_child = self._forest.has_child
        aside = (key for _, key in self._aside)
        patiently = ((key, None) for key in islice(aside, PATIENCE))
        parents: list[Key] = []
        passed: list[Key] = []
        for older, younger in concat(patiently, zip_longest(aside, self._ahead)):
            if older is not None:
                if has_child(older):
                    parents.append(older)
                elif not busy(older):
                    self._settle(parents, passed)
                    return older
            if younger is not None:
                if not has_child(younger) and not busy(younger):
                    self._settle(parents, passed)
                    return younger
                passed.append(younger)
        return None

    def next_in_age(self) -> Key | None:
        """The oldest key, leaf or not, save parents whose turn has come."""
        return next(concat((key for _, key in self._aside), self._ahead), None)

    def __contains__(self, key: object) -> bool:
        return key in self._ahead or key in self._numbers

    def __iter__(self) -> Iterator[Key]:
        """Oldest first."""
        return concat(sorted(self._numbers, key=self._numbers.__getitem__), self._ahead)

    def __len__(self) -> int:
        return len(self._ahead) + len(self._numbers)

    def check_integrity(self) -> None:
        assert self._numbers.keys().isdisjoint(self._ahead), "a key stands in two places"
        assert all(key in self._forest for key in self), "a key stands here that is not resident"
        assert all(map(self._forest.has_child, self._parked)), "a leaf waits for its child to go"
        aside = {key: number for number, key in self._aside}
        assert self._aside == sorted(self._aside)
        assert aside.items() <= self._numbers.items()
        assert aside.keys() | self._parked == self._numbers.keys()
        assert len(self._aside) + len(self._parked) == len(self._numbers)

    def _settle(self, parents: list[Key], passed: list[Key]) -> None:
        """Parents are not looked at again before they are leaves; the rest of `passed` is aside."""
        for key in parents:
            del self._aside[bisect_left(self._aside, (self._numbers[key], key))]
        self._parked.update(parents)
        for key in passed:
            del self._ahead[key]
            self._numbers[key] = number = self._next_number
            self._next_number += 1
            if self._forest.has_child(key):
                self._parked.add(key)
            else:
                self._aside.append((number, key))
