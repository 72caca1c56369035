"""Gather and scatter in CPU memory: one numpy element per page and plane, where a page is packed.

A page's bytes are moved whole, as an element of a void type: that needs no dtype numpy would have
to know, and keeps pace with a loop of memcpy over the same pages. Pages that follow each other are
moved as one slice, of all planes that lie evenly apart. Of pages that are not packed, an element is
the part of a head.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from .page_copy import Indices, PageCopy
from .paged import PagedKV, stacked

Rows = npt.NDArray[Any]

_MIN_RUN = 32
"""Pages per run, on average, from which on slices are faster than an index for every page."""


def gather(copy: PageCopy) -> None:
    for pages, packed, numbers in _pieces(copy):
        runs = _runs(numbers)
        if _are_long(runs, numbers):
            for start, stop, page in _spans(runs, numbers):
                packed[:, start:stop] = pages[:, page : page + stop - start]
            continue
        units, source, target = _in_units(runs, numbers, pages, packed)
        for plane, filled in zip(source, target, strict=True):
            if plane.flags.c_contiguous:
                # Units are in range: clip only spares take the buffer that raising would need.
                np.take(plane, units, axis=0, out=filled, mode="clip")
            else:
                filled[...] = plane[units]


def scatter(copy: PageCopy) -> None:
    for pages, packed, numbers in _pieces(copy):
        runs = _runs(numbers)
        if _are_long(runs, numbers):
            for start, stop, page in _spans(runs, numbers):
                pages[:, page : page + stop - start] = packed[:, start:stop]
            continue
        units, target, source = _in_units(runs, numbers, pages, packed)
        for plane, filled in zip(source, target, strict=True):
            filled[units] = plane


@dataclass(frozen=True, slots=True)
class _Stack:
    """Planes evenly apart. pages: (planes, num_pages * step, …), page p at p * step."""

    pages: Rows
    step: int
    inner: tuple[int, ...]
    """Shape of a page, in bytes: one dimension where it is packed."""


_STACKS: WeakKeyDictionary[PagedKV, list[_Stack]] = WeakKeyDictionary()
"""Views are slow to make and good for as long as the memory is."""


def _pieces(copy: PageCopy) -> Iterator[tuple[Rows, Rows, Indices]]:
    """(pages, packed, numbers): packed[:, i] is of pages[:, numbers[i]]. Planes come first."""
    if copy.kv not in _STACKS:
        _STACKS[copy.kv] = [_stack(planes) for planes in stacked(copy.kv.planes)]
    segments = list(_segments(copy))
    chunks, offset = copy.chunks.detach().numpy(), 0
    for stack in _STACKS[copy.kv]:
        shape = (len(stack.pages), copy.pages_per_chunk, *stack.inner)
        size = math.prod(shape)
        packed = _elements(chunks[:, offset : offset + size].reshape(len(chunks), *shape))
        offset += size
        for chunk, start, numbers in segments:
            yield (
                stack.pages,
                packed[chunk, :, start : start + len(numbers)],
                numbers * stack.step,
            )


def _segments(copy: PageCopy) -> Iterator[tuple[int, int, Indices]]:
    """(chunk, start, pages): those pages are of places start, start + 1, … of one chunk."""
    pages, places = copy.pages, copy.places
    runs = _runs(places)
    if len(runs) > 1 and (places[1:] < places[:-1]).any():  # in order, they make fewer runs
        order = np.argsort(places, kind="stable")
        pages, places = pages[order], places[order]
        runs = _runs(places)
    for start, stop, place in _spans(runs, places):
        while start < stop:
            chunk, first = divmod(place, copy.pages_per_chunk)
            count = min(stop - start, copy.pages_per_chunk - first)
            yield chunk, first, pages[start : start + count]
            start, place = start + count, place + count


def _stack(planes: torch.Tensor) -> _Stack:
    count, num_pages, tokens, heads, head_bytes = planes.shape
    apart, page_stride = planes.stride()[:2]
    size = tokens * heads * head_bytes
    packed = planes[0, 0].is_contiguous()
    if not packed or not page_stride or page_stride % size:
        return _Stack(_elements(planes.numpy()), 1, (tokens, heads, head_bytes))
    # Other bytes may lie between pages, but in units of a page: numpy.take needs rows without gaps.
    step = page_stride // size
    shape = (count, (num_pages - 1) * step + 1, size)
    rows = planes.as_strided(shape, (apart, size, 1), planes.storage_offset())
    return _Stack(_elements(rows.numpy()), step, (size,))


def _elements(array: npt.NDArray[np.uint8]) -> Rows:
    """Without the last dimension, which becomes the element."""
    return array.view(f"V{array.shape[-1]}")[..., 0]


def _runs(numbers: Indices) -> list[int]:
    """Where in `numbers` a run of consecutive ones starts."""
    (breaks,) = (numbers[1:] - numbers[:-1] != 1).nonzero()
    return [0, *(breaks + 1).tolist()]


def _are_long(runs: list[int], numbers: Indices) -> bool:
    return len(runs) == 1 or len(runs) * _MIN_RUN <= len(numbers)


def _spans(runs: list[int], numbers: Indices) -> Iterator[tuple[int, int, int]]:
    """(start, stop, page): numbers[start:stop] are page, page + 1, …"""
    for start, stop in pairwise([*runs, len(numbers)]):
        yield start, stop, int(numbers[start])


def _in_units(
    runs: list[int], numbers: Indices, pages: Rows, packed: Rows
) -> tuple[Indices, Rows, Rows]:
    """All counted in the largest unit in which every run starts and ends: an engine's pages, where
    ours are token slots that are allocated by the page."""
    unit = math.gcd(*runs, *numbers[runs].tolist(), len(numbers))
    if unit == 1 or pages.ndim > 2:
        return numbers, pages, packed
    return numbers[::unit] // unit, _widened(pages, unit), _widened(packed, unit)


def _widened(rows: Rows, unit: int) -> Rows:
    planes, size = len(rows), unit * rows.itemsize
    num_units = rows.shape[1] // unit
    whole = rows[:, : num_units * unit].view(np.uint8)
    return _elements(whole.reshape(planes, num_units, size))
