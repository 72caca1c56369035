"""A copy between pages and chunks whose arguments fit: what base.py hands to every back end."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from .paged import PagedKV

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Page pages[i] of every plane of `kv` belongs to place places[i] of `chunks`.

    chunks: (num_chunks, at least a chunk's bytes) uint8, each row together, on the device of `kv`.
    """

    kv: PagedKV
    chunks: torch.Tensor
    pages: Indices
    places: Indices
    pages_per_chunk: int


def checked(
    kv: PagedKV,
    pages: npt.ArrayLike,
    chunks: torch.Tensor,
    pages_per_chunk: int,
    places: npt.ArrayLike | None,
    planes: range | None,
) -> PageCopy:
    """ValueError, or TypeError for another kind of thing, says which argument is what, and what it
    must be. No repeats are looked for."""
    for name, given, kind in (("kv", kv, PagedKV), ("chunks", chunks, torch.Tensor)):
        if not isinstance(given, kind):
            raise TypeError(f"{name} is a {type(given).__name__}, must be a {kind.__name__}")
    if not isinstance(pages_per_chunk, int) or pages_per_chunk < 1:
        raise ValueError(f"pages_per_chunk is {pages_per_chunk!r}, must be an int of at least 1")
    part = _part(kv, planes)
    _check_chunks(chunks, part, pages_per_chunk)
    numbers = _indices("pages", pages, part.num_pages)
    num_places = len(chunks) * pages_per_chunk
    if places is None:
        if len(numbers) > num_places:
            raise ValueError(f"{len(numbers)} pages, must be at most the {num_places} of chunks")
        return PageCopy(part, chunks, numbers, np.arange(len(numbers)), pages_per_chunk)
    where = _indices("places", places, num_places)
    if len(where) != len(numbers):
        raise ValueError(f"{len(where)} places, must be one for each of {len(numbers)} pages")
    return PageCopy(part, chunks, numbers, where, pages_per_chunk)


def _part(kv: PagedKV, planes: range | None) -> PagedKV:
    if planes is None:
        return kv
    if not isinstance(planes, range):
        raise TypeError(f"planes is {planes!r}, must be a range")
    if planes.step != 1 or not 0 <= planes.start < planes.stop <= len(kv.planes):
        raise ValueError(f"planes is {planes}, must be some of range(0, {len(kv.planes)}) in a row")
    return kv.part(planes)


def _check_chunks(chunks: torch.Tensor, kv: PagedKV, pages_per_chunk: int) -> None:
    if chunks.dim() != 2 or chunks.dtype != torch.uint8:
        raise ValueError(
            f"chunks is {chunks.dtype} {tuple(chunks.shape)}, must be uint8 of two dimensions"
        )
    if chunks.device != kv.device:
        raise ValueError(f"chunks is on {chunks.device}, kv on {kv.device}")
    size_bytes = kv.chunk_bytes(pages_per_chunk)
    if chunks.shape[1] < size_bytes:
        raise ValueError(f"chunks has {chunks.shape[1]} bytes a row, must be at least {size_bytes}")
    row_stride, byte_stride = chunks.stride()
    if byte_stride != 1 or (len(chunks) > 1 and row_stride < size_bytes):
        raise ValueError(
            f"chunks has strides {chunks.stride()}, must be at least {size_bytes} and 1"
        )


def _indices(name: str, given: npt.ArrayLike, size: int) -> Indices:
    array = np.asarray(given)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{name} are {array.dtype} {array.shape}, must be integers in one row")
    indices = array.astype(np.int64, copy=False)
    # As unsigned, a negative number is above every bound: one pass checks both ends.
    if len(indices) and indices.view(np.uint64).max() >= size:
        at = int(np.argmax((indices < 0) | (indices >= size)))
        raise ValueError(f"{name}[{at}] is {indices[at]}, must be from 0 to {size - 1}")
    return indices
