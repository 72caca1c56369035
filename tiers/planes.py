"""What copies have to know of the planes of a kv, found out once: every batch asks."""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from ..kernels.paged import PagedKV, page_bytes

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Planes:
    """Where they lie and how large their pages are, plane by plane."""

    addresses: Integers
    pitches: Integers
    """Bytes from a page to the next."""
    sizes: Integers
    """Bytes of a page, packed."""
    starts: Integers
    """Bytes of a page, packed, of all planes before; of all planes at the end."""
    packed_page_bytes: int
    """Of the smallest page, if the bytes of every page lie together; else 0."""


_KNOWN: WeakKeyDictionary[PagedKV, Planes] = WeakKeyDictionary()


def planes_of(kv: PagedKV) -> Planes:
    if kv not in _KNOWN:
        _KNOWN[kv] = _look_at(kv)
    return _KNOWN[kv]


def part_bytes(kv: PagedKV, num_pages: int, planes: range) -> int:
    """Of that many pages, packed, of those planes; of none, if there are none."""
    starts = planes_of(kv).starts
    return num_pages * int(starts[planes.stop] - starts[planes.start])


def _look_at(kv: PagedKV) -> Planes:
    sizes = [page_bytes(plane) for plane in kv.planes]
    packed = all(plane[0].is_contiguous() for plane in kv.planes)
    return Planes(
        np.array([plane.data_ptr() for plane in kv.planes], np.int64),
        np.array([plane.stride(0) for plane in kv.planes], np.int64),
        np.array(sizes, np.int64),
        np.cumsum([0, *sizes], dtype=np.int64),
        min(sizes) if packed else 0,
    )
