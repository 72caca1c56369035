"""Which chunks are on their way into HBM, and who should wait for them.

vLLM lets a request whose prefix another one is loading wait until that whole load is done: then
the prefix is in HBM once and not twice. Behind a much longer load that is a bad bargain, so there
a request loads its own copy.
"""

from collections.abc import Callable, Iterable

from vllm.v1.kv_offload.base import OffloadKey

PATIENCE = 2
"""A request waits for loads of up to so many times as many chunks as its own."""


class LoadsUnderWay:
    """Stands in for the set of keys that vLLM's scheduler keeps of loads under way.

    num_own: chunks that the request which is being scheduled would load itself.
    """

    def __init__(self, num_own: Callable[[], int]) -> None:
        self._num_own = num_own
        self._sizes: dict[OffloadKey, int] = {}  # chunks of the load that each is part of

    def update(self, keys: Iterable[OffloadKey]) -> None:
        load = list(keys)
        self._sizes.update(dict.fromkeys(load, len(load)))

    def difference_update(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            self._sizes.pop(key, None)

    def clear(self) -> None:
        self._sizes.clear()

    def __contains__(self, key: OffloadKey) -> bool:
        """Whether the request should wait for this chunk."""
        size = self._sizes.get(key)
        return size is not None and size <= PATIENCE * self._num_own()

    def __len__(self) -> int:
        return len(self._sizes)
