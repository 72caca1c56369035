"""What csrc/fp8.cu is launched with, and the launches, which are as those of cuda.py."""

from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from .cuda import launch
from .fp8_copy import Fp8Copy
from .launch import Launch
from .paged import PagedKV

GROUP = 8
"""Elements that a thread takes at once, as in fp8.cu."""

MOST_THREADS = 512
"""Of a block, as in fp8.cu."""

_SCATTER_THREADS = 128
"""Enough where a page is one token; a block is done soon, and many fit a multiprocessor."""


def gather(copy: Fp8Copy) -> None:
    launch("fp8.cu", f"gather_fp8_{_suffix(copy)}", copy.kv.device, plan_gather(copy))


def scatter(copy: Fp8Copy) -> None:
    launch("fp8.cu", f"scatter_fp8_{_suffix(copy)}", copy.kv.device, plan_scatter(copy))


def plan_gather(copy: Fp8Copy, *, most_threads: int = MOST_THREADS) -> Launch:
    """For a copy that is whole. A block per chunk, plane and head: it finds the scale."""
    rows = copy.rows[:: copy.pages_per_chunk]
    heads = max(plane.shape[2] for plane in copy.kv.planes)
    tokens = copy.pages_per_chunk * max(plane.shape[1] for plane in copy.kv.planes)
    num_planes = len(copy.kv.planes)
    return Launch(
        grid=len(rows) * num_planes * heads,
        block=min(most_threads, _power_of_two(tokens * _groups(copy))),
        words=np.concatenate([_table(copy), copy.pages, rows]),
        numbers=(
            *(num_planes, len(copy.pages), heads, copy.pages_per_chunk),
            *(copy.chunks.data_ptr(), copy.chunks.stride(0)),
            *(copy.layout.payload_bytes, copy.layout.scales[0]),
        ),
    )


def plan_scatter(copy: Fp8Copy, *, most_threads: int = _SCATTER_THREADS) -> Launch:
    """A block per page and plane."""
    rows = max(plane.shape[1] * plane.shape[2] for plane in copy.kv.planes)
    num_planes = len(copy.kv.planes)
    return Launch(
        grid=len(copy.pages) * num_planes,
        block=min(most_threads, _power_of_two(rows * _groups(copy))),
        words=np.concatenate([_table(copy), copy.pages, copy.rows, copy.places]),
        numbers=(num_planes, len(copy.pages), copy.chunks.data_ptr(), copy.chunks.stride(0)),
    )


_STRIDES: WeakKeyDictionary[PagedKV, npt.NDArray[np.int64]] = WeakKeyDictionary()
"""What of the table follows from the planes alone."""


def _table(copy: Fp8Copy) -> npt.NDArray[np.int64]:
    """A row per plane, as fp8.cu has it."""
    if copy.kv not in _STRIDES:
        rows = [
            (p.data_ptr(), *p.stride()[:3], *p.shape[1:3], p.shape[3] // copy.dtype.itemsize)
            for p in copy.kv.planes
        ]
        _STRIDES[copy.kv] = np.array(rows, np.int64)
    starts = [copy.layout.payload, copy.layout.scales]
    return np.column_stack([_STRIDES[copy.kv], *starts]).ravel()


def _groups(copy: Fp8Copy) -> int:
    """Of a token's head, where it has most."""
    elements = max(plane.shape[3] for plane in copy.kv.planes) // copy.dtype.itemsize
    return -(-elements // GROUP)


def _power_of_two(at_least: int) -> int:
    return 1 << (at_least - 1).bit_length()


def _suffix(copy: Fp8Copy) -> str:
    return str(copy.dtype).removeprefix("torch.")
