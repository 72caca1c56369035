"""A bounded memory of keys that are no longer resident: who comes back soon was let go too early.

Ghost entries go back to 2Q (Johnson and Shasha, VLDB 1994) and ARC. Tails leave a tier before
their heads, so remembered in the order in which they left they are forgotten before them too.
"""

from collections import OrderedDict

from .base import Key


class GhostHistory:
    """At most `limit` keys, oldest first. The limit may be changed; it holds from the next
    remember() or trim() on."""

    def __init__(self, limit: int) -> None:
        if limit < 0:
            raise ValueError(f"limit is {limit}, must be at least 0")
        self.limit = limit
        self._keys: OrderedDict[Key, None] = OrderedDict()

    def remember(self, key: Key) -> None:
        """`key` left just now."""
        self._keys[key] = None
        self._keys.move_to_end(key)
        self.trim()

    def trim(self) -> None:
        """Forget the oldest keys beyond the limit."""
        while len(self._keys) > self.limit:
            self._keys.popitem(last=False)

    def forget_oldest(self) -> None:
        """There is one."""
        self._keys.popitem(last=False)

    def discard(self, key: Key) -> None:
        """`key` came back; unknown keys are passed over."""
        self._keys.pop(key, None)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)
