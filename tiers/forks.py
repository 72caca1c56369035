"""A store belongs to the process that opened it: in a child that was forked it is closed.

The child has the parent's slots mapped, and none of its threads: it would write over what the
parent serves, and wait for reads that nobody does.
"""

import os
from typing import Protocol
from weakref import WeakSet


class Disowned(Protocol):
    def disown(self) -> None:
        """In a child: from now on every call is refused, and nothing is released, which would be
        the parent's."""


_STORES: WeakSet[Disowned] = WeakSet()


def disown_in_children(store: Disowned) -> None:
    _STORES.add(store)


def _disown_all() -> None:
    for store in _STORES:
        store.disown()


os.register_at_fork(after_in_child=_disown_all)
