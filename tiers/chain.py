"""The keys of one request, checked once: who asks the store often for one chain keeps one."""

from __future__ import annotations

from collections.abc import Iterable

from ..admission.base import Key

KEY_BYTES = 32


class CheckedChain(tuple[Key, ...]):
    """Keys, head first, as chunk_keys() makes them: each of 32 bytes, none twice.

    TypeError or ValueError names what is wrong with any other keys. A slice is a plain tuple.
    """

    __slots__ = ()

    def __new__(cls, keys: Iterable[Key]) -> CheckedChain:
        chain = super().__new__(cls, keys)
        check_keys("keys", chain)
        if len(set(chain)) < len(chain):
            raise ValueError("a key stands twice in keys, which no chain has")
        return chain

    def head(self, stop: int) -> CheckedChain:
        """The chain up to chunk `stop`."""
        return self if stop >= len(self) else tuple.__new__(CheckedChain, self[:stop])


def check_keys(name: str, keys: tuple[Key, ...]) -> None:
    if set(map(type, keys)) <= {bytes} and set(map(len, keys)) <= {KEY_BYTES}:
        return
    for index, key in enumerate(keys):
        if type(key) is not bytes or len(key) != KEY_BYTES:
            made = f"must be {KEY_BYTES} bytes as chunk_keys() makes them"
            raise TypeError(f"{name}[{index}] is {key!r}, {made}")
