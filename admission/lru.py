"""Least recently used, leaf first: a request touches its chain from tail to head, so that of one
chain the tail is always the older, and among chains the one unused for longest goes first."""

from collections import OrderedDict, deque
from collections.abc import Callable

from .base import Chain, EvictionOrder, Key


class LruOrder(EvictionOrder):
    def __init__(self) -> None:
        self._parents: OrderedDict[Key, Key | None] = OrderedDict()  # oldest use first
        # Children by parent, resident or not. Most nodes have one child, so one is kept bare.
        self._children: dict[Key, Key | set[Key]] = {}

    def add(self, key: Key, parent: Key | None) -> None:
        if key in self._parents:
            return
        self._parents[key] = parent
        if parent is None:
            return
        siblings = self._children.get(parent)
        if siblings is None:
            self._children[parent] = key
        elif isinstance(siblings, set):
            siblings.add(key)
        else:
            self._children[parent] = {siblings, key}

    def touch(self, chain: Chain, stop: int) -> None:
        resident = filter(self._parents.__contains__, reversed(chain[:stop]))
        deque(map(self._parents.move_to_end, resident), maxlen=0)  # a loop at C's speed

    def discard(self, key: Key) -> None:
        parent = self._parents.pop(key, None)
        if parent is None:
            return
        siblings = self._children[parent]
        if isinstance(siblings, set) and len(siblings) > 1:
            siblings.remove(key)
        else:
            del self._children[parent]

    def victim(self, busy: Callable[[Key], bool]) -> Key | None:
        """What is passed over counts as used now: it is in use, or something below it is. So a
        crowd of busy chunks is walked over once, not for every victim."""
        children = self._children
        passed: list[Key] = []
        for key in self._parents:
            if key not in children and not busy(key):
                break
            passed.append(key)
        else:
            return None
        for other in reversed(passed):  # a tail stays older than its head
            self._parents.move_to_end(other)
        return key

    def descendants(self, key: Key) -> list[Key]:
        found: list[Key] = []
        level = self._children_of(key)
        while level:
            found += level
            level = [grandchild for child in level for grandchild in self._children_of(child)]
        return found

    def has_child(self, key: Key) -> bool:
        return key in self._children

    def __contains__(self, key: object) -> bool:
        return key in self._parents

    def __len__(self) -> int:
        return len(self._parents)

    def check_integrity(self) -> None:
        counted = 0
        for parent in self._children:
            for child in self._children_of(parent):
                assert self._parents[child] == parent, "a child is filed under another parent"
                counted += 1
        heads = sum(parent is None for parent in self._parents.values())
        assert counted + heads == len(self._parents), "a resident key has no place in the forest"

    def _children_of(self, key: Key) -> list[Key]:
        children = self._children.get(key)
        if children is None:
            return []
        return list(children) if isinstance(children, set) else [children]
