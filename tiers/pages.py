"""The hot tier's memory: the KV pages of all layers as one tensor, handed out by token slot.

    page     0               1               2
    slot     0   1   2   3 | 4   5   6   7 | 8   9  10  11      (page_size=4)
    alloc    [-- 6 slots: two pages --] .   . | free

A page is handed out whole and comes back once none of its slots is in use, so slots may be freed
one by one. What is allocated together ascends, as far as pages are free in a row: copies in and
out then move runs, not tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from .layout import KVLayout

Slots = npt.NDArray[np.int64]


class PagePool:
    """Owns `pages`, (num_layers, kv_factor, num_tokens, num_kv_heads, head_dim) on `device`.

    Token slot s is pages[:, :, s]. num_tokens: slots in the pool, a multiple of page_size.
    For one thread. ValueError names a wrong argument, before anything changes.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_tokens: int,
        device: torch.device | str = "cpu",
        page_size: int = 1,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size is {page_size}, must be at least 1")
        if num_tokens < page_size or num_tokens % page_size:
            raise ValueError(
                f"num_tokens is {num_tokens}, must be a positive multiple of page_size, {page_size}"
            )
        self.layout = layout
        self.num_tokens = num_tokens
        self.page_size = page_size
        # Zeros: an engine may read a slot nobody wrote, masked, and NaN would outlive the mask.
        self.pages = torch.zeros(
            layout.shape(num_tokens), dtype=getattr(torch, layout.dtype), device=device
        )
        self._in_use = np.zeros(num_tokens, np.bool_)
        # A stack of free page numbers: _free[:_num_free] are free, the last goes first.
        self._free = np.arange(num_tokens // page_size, dtype=np.int64)[::-1].copy()
        self._num_free = len(self._free)

    @property
    def num_free(self) -> int:
        """Slots that `allocate` can still give, up to the last: those of wholly free pages."""
        return self._num_free * self.page_size

    def allocate(self, num_tokens: int) -> Slots | None:
        """Slots for `num_tokens` tokens, or None, with nothing changed, if there are too few.

        The slots fill whole pages in order; what is left of the last page stays unused.
        """
        if num_tokens < 0:
            raise ValueError(f"num_tokens is {num_tokens}, must be at least 0")
        num_pages = -(-num_tokens // self.page_size)
        if num_pages > self._num_free:
            return None
        left = self._num_free - num_pages
        pages = self._free[left : self._num_free][::-1]
        slots = (pages[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)
        slots = slots[:num_tokens]
        self._in_use[slots] = True
        self._num_free = left
        return slots

    def free(self, slots: npt.ArrayLike) -> None:
        """Take slots back, in any order and grouping; pages left without a user are free again.

        ValueError names a slot that is out of range, not in use, or given twice.
        """
        ascending = self._checked(slots)
        self._in_use[ascending] = False
        pages = ascending
        if self.page_size > 1:
            pages = np.unique(ascending // self.page_size)
            pages = pages[~self._in_use.reshape(-1, self.page_size)[pages].any(axis=1)]
        self._free[self._num_free : self._num_free + len(pages)] = pages[::-1]
        self._num_free += len(pages)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the free pages are exactly those with no slot in use."""
        free = self._free[: self._num_free]
        idle = np.flatnonzero(~self._in_use.reshape(-1, self.page_size).any(axis=1))
        assert np.array_equal(np.sort(free), idle), "free pages are not the pages without a user"

    def _checked(self, slots: npt.ArrayLike) -> Slots:
        array = np.asarray(slots)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise ValueError(f"slots are {array.dtype} {array.shape}, must be integers in one row")
        ascending = np.sort(array.astype(np.int64, copy=False))
        if len(ascending) and not 0 <= ascending[0] <= ascending[-1] < self.num_tokens:
            wrong = ascending[0] if ascending[0] < 0 else ascending[-1]
            raise ValueError(f"slot {wrong} must be from 0 to {self.num_tokens - 1}")
        if not self._in_use[ascending].all():
            raise ValueError(f"slot {ascending[~self._in_use[ascending]][0]} is not in use")
        twice = ascending[1:] == ascending[:-1]
        if twice.any():
            raise ValueError(f"slot {ascending[1:][twice][0]} is given twice")
        return ascending
