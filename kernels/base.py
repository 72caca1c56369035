"""The two copies between an engine's pages and chunks, and who does them on which device.

Bytes are copied as they are, whatever the dtype. How a chunk packs pages is said in paged.py.
"""

from typing import Protocol

import numpy.typing as npt
import torch

from . import cpu
from .page_copy import PageCopy, checked
from .paged import PagedKV


def gather(
    kv: PagedKV,
    pages: npt.ArrayLike,
    chunks: torch.Tensor,
    *,
    pages_per_chunk: int,
    places: npt.ArrayLike | None = None,
    planes: range | None = None,
) -> None:
    """Copy page pages[i] of every plane to place places[i] of `chunks`; one launch on a GPU.

    chunks: (num_chunks, size_bytes) uint8 on the device of `kv`; rows may lie apart.
    places: page p of chunk c is place c * pages_per_chunk + p; 0, 1, 2, … unless given. They must
        differ from each other, which is not checked; pages may repeat.
    planes: only these; a chunk then holds just their part of it.

    ValueError if an argument does not fit, before anything is written. On a GPU this only launches,
    on the current stream: whoever owns that keeps `kv` and `chunks` as they are until it is done.
    """
    copy = checked(kv, pages, chunks, pages_per_chunk, places, planes)
    if len(copy.pages):
        _backend(kv.device).gather(copy)


def scatter(
    chunks: torch.Tensor,
    kv: PagedKV,
    pages: npt.ArrayLike,
    *,
    pages_per_chunk: int,
    places: npt.ArrayLike | None = None,
    planes: range | None = None,
) -> None:
    """The reverse of gather: pages must differ from each other, places may repeat.

    Raises and launches like `gather`. A repeated page ends up with any one of its contents, or a
    mixture of them.
    """
    copy = checked(kv, pages, chunks, pages_per_chunk, places, planes)
    if len(copy.pages):
        _backend(kv.device).scatter(copy)


class _Backend(Protocol):
    """A copy of at least one page, either way."""

    def gather(self, copy: PageCopy) -> None: ...

    def scatter(self, copy: PageCopy) -> None: ...


def _backend(device: torch.device) -> _Backend:
    if device.type == "cpu":
        return cpu
    if device.type == "cuda":
        from . import cuda  # needs CuPy, which is only there with CUDA

        return cuda
    raise ValueError(f"kv is on {device}, must be on cpu or cuda")
