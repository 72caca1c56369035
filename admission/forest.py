"""Which of a tier's keys hang from which, so that a chain can be taken from its tail."""

from collections.abc import Iterator

from .base import Key


class Forest:
    """Resident keys with their parents. A parent may live elsewhere: its children are known all the
    same."""

    def __init__(self) -> None:
        self._parents: dict[Key, Key | None] = {}
        # Children by parent, resident or not. Most nodes have one child, so one is kept bare.
        self._children: dict[Key, Key | set[Key]] = {}

    def add(self, key: Key, parent: Key | None) -> bool:
        """False when `key` is here already; it stays where it hangs then."""
        if key in self._parents:
            return False
        self._parents[key] = parent
        if parent is not None:
            self._hang(key, parent)
        return True

    def discard(self, key: Key) -> Key | None:
        """Take `key` out, which is here; the parent if it has no child left, resident or not."""
        parent = self._parents.pop(key)
        if parent is None:
            return None
        siblings = self._children[parent]
        if not isinstance(siblings, set):
            del self._children[parent]
            return parent
        siblings.remove(key)
        if len(siblings) == 1:
            self._children[parent] = siblings.pop()
        return None

    def parent(self, key: Key) -> Key | None:
        """Of a key that is here."""
        return self._parents[key]

    def is_only_child(self, key: Key) -> bool:
        """Whether a key that is here is the only one to hang from its parent."""
        parent = self._parents[key]
        return parent is not None and self._children[parent] == key

    def has_child(self, key: Key) -> bool:
        return key in self._children

    def descendants(self, key: Key) -> list[Key]:
        """Resident keys below `key`, parents before children."""
        found: list[Key] = []
        level = self._children_of(key)
        while level:
            found += level
            level = [grandchild for child in level for grandchild in self._children_of(child)]
        return found

    def __contains__(self, key: object) -> bool:
        return key in self._parents

    def __iter__(self) -> Iterator[Key]:
        return iter(self._parents)

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

    def _hang(self, key: Key, parent: Key) -> None:
        siblings = self._children.get(parent)
        if siblings is None:
            self._children[parent] = key
        elif isinstance(siblings, set):
            siblings.add(key)
        else:
            self._children[parent] = {siblings, key}

    def _children_of(self, key: Key) -> list[Key]:
        children = self._children.get(key)
        if children is None:
            return []
        return list(children) if isinstance(children, set) else [children]
