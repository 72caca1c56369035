"""Gather and scatter in CPU memory: one numpy element per token, layer and K or V.

A token's heads lie together, so a row of bytes is moved whole, as an element of a void type: that
needs no dtype numpy would have to know, and keeps pace with a loop of memcpy over the same rows.
Slots that follow each other are moved as one slice. Arguments come checked.
"""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Slots = npt.NDArray[np.int64]
Rows = npt.NDArray[Any]

_MIN_RUN = 32
"""Tokens per run, on average, from which on slices are faster than an index for every token."""


def gather(pages: torch.Tensor, slots: Slots, out: torch.Tensor) -> None:
    source, target = _rows(pages), _rows(out)
    runs = _runs(slots)
    if len(runs) * _MIN_RUN > len(slots):
        units, source, target = _in_units(runs, slots, source, target)
        for plane, filled in zip(source, target, strict=True):
            # Units are in range: clip only spares take the buffer that raising would need.
            np.take(plane, units, out=filled, mode="clip")
        return
    for start, stop, slot in _spans(runs, slots):
        target[:, start:stop] = source[:, slot : slot + stop - start]


def scatter(chunk: torch.Tensor, pages: torch.Tensor, slots: Slots) -> None:
    source, target = _rows(chunk), _rows(pages)
    runs = _runs(slots)
    if len(runs) * _MIN_RUN > len(slots):
        units, target, source = _in_units(runs, slots, target, source)
        for plane, filled in zip(source, target, strict=True):
            filled[units] = plane
        return
    for start, stop, slot in _spans(runs, slots):
        target[:, slot : slot + stop - start] = source[:, start:stop]


def _rows(tensor: torch.Tensor) -> Rows:
    """(num_layers * kv_factor, tokens) void elements that share the tensor's memory."""
    layers, kv_factor, num_tokens, heads, head_dim = tensor.shape
    row_bytes = heads * head_dim * tensor.element_size()
    flat = tensor.detach().view(torch.uint8).numpy()
    rows = flat.reshape(layers * kv_factor, num_tokens, row_bytes).view(f"V{row_bytes}")
    return rows[..., 0]


def _runs(slots: Slots) -> list[int]:
    """Where in `slots` a run of consecutive slots starts."""
    (breaks,) = (slots[1:] - slots[:-1] != 1).nonzero()
    return [0, *(breaks + 1).tolist()] if len(slots) else []


def _in_units(runs: list[int], slots: Slots, pages: Rows, chunk: Rows) -> tuple[Slots, Rows, Rows]:
    """Slots, pages and chunk counted in the largest unit in which every run starts and ends: an
    engine's pages, where slots are allocated by the page."""
    unit = math.gcd(*runs, *slots[runs].tolist(), len(slots), pages.shape[1])
    if unit == 1:
        return slots, pages, chunk
    return slots[::unit] // unit, _widened(pages, unit), _widened(chunk, unit)


def _widened(rows: Rows, unit: int) -> Rows:
    planes, num_tokens = rows.shape
    wide = rows.view(np.uint8).reshape(planes, num_tokens // unit, unit * rows.itemsize)
    return wide.view(f"V{unit * rows.itemsize}")[..., 0]


def _spans(runs: list[int], slots: Slots) -> Iterator[tuple[int, int, int]]:
    """(start, stop, slot): slots[start:stop] are slot, slot + 1, …"""
    for start, stop in pairwise([*runs, len(slots)]):
        yield start, stop, int(slots[start])
