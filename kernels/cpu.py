"""Gather and scatter in CPU memory: one numpy element per page and plane, where a page is packed.

A page's bytes are moved whole, as an element of a void type: that needs no dtype numpy would have
to know, and keeps pace with a loop of memcpy over the same pages. Pages that follow each other are
moved as one slice, of all planes that lie evenly apart. Of pages that are not packed, an element is
the part of a head.

A plane's part of a chunk may be small, so next to nothing is done for each but the copy itself:
which pages follow each other is found out once a chunk, and how planes are seen once a kv.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from .page_copy import Indices, PageCopy
from .paged import PagedKV, stacked

Bytes = npt.NDArray[np.uint8]
Rows = npt.NDArray[Any]
_Moves = list[tuple[Any, Any]]
"""(there, here): what of an engine's memory, and what of a chunk; slices or an index."""

_ALL = slice(None)

_MIN_RUN = 32
"""Pages per run, on average, from which on slices are faster than an index for every page."""


def gather(copy: PageCopy) -> None:
    chunks = copy.chunks.numpy()
    for chunk, first, pages in _segments(copy):
        gather_chunk(copy.kv, pages, chunks[chunk], copy.pages_per_chunk, first)


def scatter(copy: PageCopy) -> None:
    chunks = copy.chunks.numpy()
    for chunk, first, pages in _segments(copy):
        scatter_chunk(chunks[chunk], copy.kv, pages, copy.pages_per_chunk, first)


def gather_chunk(
    kv: PagedKV, pages: Indices, chunk: Bytes, pages_per_chunk: int, first: int
) -> None:
    """Page pages[i] of every plane to page first + i of one chunk. Arguments come checked."""
    for memory, packed, moves in _by_group(kv, pages, chunk, pages_per_chunk, first):
        for rows, filled in zip(memory, packed, strict=True):
            for there, here in moves:
                if rows.ndim == 1:
                    # Pages are in range: clip only spares take the buffer that raising would need.
                    rows.take(there, out=filled[here], mode="clip")
                else:
                    filled[here] = rows[there]


def scatter_chunk(
    chunk: Bytes, kv: PagedKV, pages: Indices, pages_per_chunk: int, first: int
) -> None:
    """The reverse of gather_chunk."""
    for memory, packed, moves in _by_group(kv, pages, chunk, pages_per_chunk, first):
        for filled, rows in zip(memory, packed, strict=True):
            for there, here in moves:
                filled[there] = rows[here]


@dataclass(frozen=True, slots=True)
class _Form:
    """How planes are seen. An element is a part of a head, a page, or `unit` pages.

    inner: elements of a page that is not packed, (tokens, heads); else empty.
    step: elements of a page's size from a page to the next, where other bytes lie between.
    """

    num_planes: int
    element: np.dtype[Any]
    inner: tuple[int, ...] = ()
    step: int = 1
    unit: int = 1

    def in_elements(self, pages: Indices) -> Indices:
        """Where in a plane's elements those pages are."""
        if self.unit == self.step == 1:
            return pages
        return pages[:: self.unit] // self.unit * self.step


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Planes of one form whose parts of a chunk lie together.

    stacks: as many planes at a time as lie evenly apart, (planes, pages / unit, *inner).
    planes: the same one by one, (elements,) without gaps where a page is packed.
    part: of a chunk, bytes; by_stack, by_plane: its shape, as that of `stacks` and `planes`.
    """

    form: _Form
    stacks: Sequence[Rows]
    planes: Sequence[Rows]
    part: slice
    by_stack: tuple[int, ...]
    by_plane: tuple[int, ...]

    def packed(self, chunk: Bytes) -> Rows:
        """Its part of a chunk, one element after the other."""
        return chunk[self.part].view(self.form.element)


_GROUPS: WeakKeyDictionary[PagedKV, dict[tuple[int, int], list[_Group]]] = WeakKeyDictionary()
"""Views are slow to make and good for as long as the memory is."""


def _segments(copy: PageCopy) -> Iterator[tuple[int, int, Indices]]:
    """(chunk, first, pages): those pages are of places first, first + 1, … of one chunk."""
    pages, places = copy.pages, copy.places
    runs = _runs(places)
    if len(runs) > 1 and (places[1:] < places[:-1]).any():  # in order, they make fewer runs
        order = np.argsort(places, kind="stable")
        pages, places = pages[order], places[order]
        runs = _runs(places)
    for start, stop in pairwise([*runs, len(places)]):
        place = int(places[start])
        while start < stop:
            chunk, first = divmod(place, copy.pages_per_chunk)
            count = min(stop - start, copy.pages_per_chunk - first)
            yield chunk, first, pages[start : start + count]
            start, place = start + count, place + count


def _by_group(
    kv: PagedKV, pages: Indices, chunk: Bytes, pages_per_chunk: int, first: int
) -> Iterator[tuple[Sequence[Rows], Rows, _Moves]]:
    """(memory, packed, moves): of all rows of both, memory's [there] belongs to packed's [here]."""
    runs = _runs(pages)
    if len(runs) == 1 or len(runs) * _MIN_RUN <= len(pages):
        slices = _slices(runs, pages, first)
        for group in _groups(kv, pages_per_chunk, 1):
            yield group.stacks, group.packed(chunk).reshape(group.by_stack), slices
        return
    for group in _groups(kv, pages_per_chunk, _unit(runs, pages, pages_per_chunk, first)):
        unit = group.form.unit
        places = slice(first // unit, (first + len(pages)) // unit)
        index = [(group.form.in_elements(pages), places)]
        yield group.planes, group.packed(chunk).reshape(group.by_plane), index


def _runs(numbers: Indices) -> list[int]:
    """Where in `numbers` a run of consecutive ones starts."""
    breaks = numbers[1:] - numbers[:-1] != 1
    if not np.count_nonzero(breaks):
        return [0] if len(numbers) else []
    return [0, *(breaks.nonzero()[0] + 1).tolist()]


def _slices(runs: list[int], pages: Indices, first: int) -> _Moves:
    """A move for each run, of all planes of a stack."""
    moves: _Moves = []
    for start, stop in pairwise([*runs, len(pages)]):
        page, place = int(pages[start]), first + start
        there, here = slice(page, page + stop - start), slice(place, first + stop)
        moves.append(((_ALL, there), (_ALL, here)))
    return moves


def _unit(runs: list[int], pages: Indices, pages_per_chunk: int, first: int) -> int:
    """The most pages that, taken as one, every run is whole ones of: an engine's pages, where ours
    are token slots that are allocated by the page."""
    unit = math.gcd(pages_per_chunk, first, len(pages), runs[1])
    return unit if unit == 1 else math.gcd(unit, *runs, *pages[runs].tolist())


def _groups(kv: PagedKV, pages_per_chunk: int, unit: int) -> list[_Group]:
    known = _GROUPS.setdefault(kv, {})
    if (pages_per_chunk, unit) not in known:
        known[pages_per_chunk, unit] = list(_grouped(kv, pages_per_chunk, unit))
    return known[pages_per_chunk, unit]


def _grouped(kv: PagedKV, pages_per_chunk: int, unit: int) -> Iterator[_Group]:
    start = 0
    seen = (_seen(planes, unit) for planes in stacked(kv.planes))
    for form, alike in groupby(seen, key=lambda pair: pair[0]):
        rows = [elements for _, elements in alike]
        stacks = [elements[:, :: form.step] for elements in rows]
        planes = [plane for elements in rows for plane in elements]
        each = (pages_per_chunk // form.unit, *form.inner)
        stop = start + len(planes) * math.prod(each) * form.element.itemsize
        by_stack, by_plane = (len(rows), form.num_planes, *each), (len(planes), *each)
        yield _Group(form, stacks, planes, slice(start, stop), by_stack, by_plane)
        start = stop


def _seen(planes: torch.Tensor, unit: int) -> tuple[_Form, Rows]:
    """Planes evenly apart, as (planes, elements, *inner). They have pages of `unit` only if pages
    are packed and follow each other without gaps."""
    count, num_pages, tokens, heads, head_bytes = planes.shape
    apart, page_stride = planes.stride()[:2]
    size = tokens * heads * head_bytes
    if not planes[0, 0].is_contiguous() or not page_stride or page_stride % size:
        parts = _elements(planes)
        return _Form(count, parts.dtype, (tokens, heads)), parts
    # Other bytes may lie between pages, but in units of a page: numpy.take needs rows without gaps.
    step = page_stride // size
    unit = unit if step == 1 else 1
    shape = (count, ((num_pages - 1) * step + 1) // unit, size * unit)
    rows = _elements(planes.as_strided(shape, (apart, size * unit, 1), planes.storage_offset()))
    return _Form(count, rows.dtype, (), step, unit), rows


def _elements(tensor: torch.Tensor) -> Rows:
    """Without the last dimension, which becomes the element."""
    return tensor.numpy().view(f"V{tensor.shape[-1]}")[..., 0]
