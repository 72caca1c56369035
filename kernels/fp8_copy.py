"""A copy between pages and quantised chunks whose arguments fit: what fp8.py hands to back ends."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from . import page_copy
from .e4m3 import WORDS
from .page_copy import Indices
from .paged import PagedKV, page_bytes

_ALIGNED = 16
"""Bytes that chunks, and the scales within, lie at multiples of."""

_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Fp8Layout:
    """Where in a chunk the elements and the scales of each plane start; fp8.py draws it."""

    payload: Sequence[int]
    payload_bytes: int
    scales: Sequence[int]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Fp8Copy:
    """Page pages[i] of every plane of `kv` is page places[i] of the chunk in row rows[i].

    chunks: (num_chunks, at least layout.size_bytes) uint8, each row together, on kv's device.
    """

    kv: PagedKV
    dtype: torch.dtype
    layout: Fp8Layout
    chunks: torch.Tensor
    pages: Indices
    rows: Indices
    places: Indices
    pages_per_chunk: int


def checked(
    kv: PagedKV,
    pages: npt.ArrayLike,
    chunks: torch.Tensor,
    pages_per_chunk: int,
    places: npt.ArrayLike | None,
) -> Fp8Copy:
    """ValueError says which argument is what, and what it must be. No repeats are looked for."""
    layout, dtype = layout_of(kv, pages_per_chunk), _dtype_of(kv)
    # A page of these planes takes as many bytes as it does in a chunk.
    copy = page_copy.checked(_narrowed(kv), pages, chunks, pages_per_chunk, places, None)
    _check_rows(chunks, layout.size_bytes)
    rows, within = np.divmod(copy.places, pages_per_chunk)
    return Fp8Copy(kv, dtype, layout, chunks, copy.pages, rows, within, pages_per_chunk)


def whole(copy: Fp8Copy) -> Fp8Copy:
    """The same, chunk after chunk and page after page. ValueError unless each has all its pages."""
    order = np.lexsort((copy.places, copy.rows))
    rows, places = copy.rows[order], copy.places[order]
    all_places = np.arange(copy.pages_per_chunk)
    for row in np.unique(rows).tolist():
        given = places[rows == row]
        if not np.array_equal(given, all_places):
            raise ValueError(
                f"chunks[{row}] is given pages {given.tolist()}, must be each of"
                f" {copy.pages_per_chunk} once: its scales depend on all"
            )
    return replace(copy, pages=copy.pages[order], rows=rows, places=places)


def layout_of(kv: PagedKV, pages_per_chunk: int) -> Fp8Layout:
    if pages_per_chunk < 1:
        raise ValueError(f"pages_per_chunk is {pages_per_chunk}, must be at least 1")
    layouts = _LAYOUTS.setdefault(kv, {})
    if pages_per_chunk not in layouts:
        layouts[pages_per_chunk] = _layout(_narrowed(kv), pages_per_chunk)
    return layouts[pages_per_chunk]


_NARROWED: WeakKeyDictionary[PagedKV, PagedKV] = WeakKeyDictionary()
_LAYOUTS: WeakKeyDictionary[PagedKV, dict[int, Fp8Layout]] = WeakKeyDictionary()
"""Found out once: what the planes are does not change."""


def _layout(narrowed: PagedKV, pages_per_chunk: int) -> Fp8Layout:
    sizes = (pages_per_chunk * page_bytes(plane) for plane in narrowed.planes)
    *payload, payload_bytes = accumulate(sizes, initial=0)
    first = -(-payload_bytes // _ALIGNED) * _ALIGNED
    heads = (_SCALE_BYTES * plane.shape[2] for plane in narrowed.planes)
    *scales, size_bytes = accumulate(heads, initial=first)
    return Fp8Layout(payload, payload_bytes, scales, size_bytes)


def _narrowed(kv: PagedKV) -> PagedKV:
    """Planes of as many elements, but of one byte each."""
    if kv not in _NARROWED:
        size = _dtype_of(kv).itemsize
        for index, plane in enumerate(kv.planes):
            _check_plane(index, plane, size)
        planes = tuple(plane[..., : plane.shape[3] // size] for plane in kv.planes)
        _NARROWED[kv] = PagedKV(planes, kv.num_layers)
    return _NARROWED[kv]


def _dtype_of(kv: PagedKV) -> torch.dtype:
    if kv.dtype not in WORDS:
        raise ValueError(f"kv.dtype is {kv.dtype}, must be one of {', '.join(map(str, WORDS))}")
    return kv.dtype


def _check_plane(index: int, plane: torch.Tensor, size: int) -> None:
    if any(n % size for n in (plane.data_ptr(), plane.shape[3], *plane.stride()[:3])):
        raise ValueError(
            f"planes[{index}] is {tuple(plane.shape)} at {plane.data_ptr()} with strides"
            f" {plane.stride()}, its elements must lie at multiples of their {size} bytes"
        )


def _check_rows(chunks: torch.Tensor, size_bytes: int) -> None:
    row_stride = chunks.stride(0) if len(chunks) > 1 else _ALIGNED * size_bytes
    if chunks.shape[1] < size_bytes or row_stride < size_bytes:
        raise ValueError(
            f"chunks is {tuple(chunks.shape)} with strides {chunks.stride()}, must have at least"
            f" {size_bytes} bytes a row"
        )
    if chunks.data_ptr() % _ALIGNED or row_stride % _ALIGNED:
        raise ValueError(
            f"chunks is at {chunks.data_ptr()} with strides {chunks.stride()}, its rows must lie"
            f" at multiples of {_ALIGNED} bytes"
        )
