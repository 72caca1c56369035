"""Gather that quantises to fp8, scatter that dequantises: chunks of half or a quarter of the bytes.

    chunk  | elements, as gather packs them, a byte each | 0 up to 16 bytes | scales |

A scale is a float32 of the machine's byte order, one for each plane and head, in that order. For
the elements x of one head of one plane of a chunk, in float32:

    amax   the largest |x| among the finite
    scale  amax / 448, but at least 2^-126; 1 where amax is 0
    q      x / scale, rounded to the nearest e4m3 number, ties to even; saturates at 448, infinities
           too; NaN stays NaN, with its sign
    x'     q * scale, rounded to the nearest of the dtype, ties to even; saturates at its largest
           finite number, which only a chunk of another dtype's pages can reach

Each line is one correctly rounded operation, the same on every device to the last bit. e4m3 is the
"fn" kind: three bits of fraction, no infinity. For a finite x, |x - x'| is at most the larger of
|x| / 16 and scale / 1024, and never above 16 * scale, which is amax / 28; but for the last bits of
float32 and of the dtype.
"""

from typing import Protocol

import numpy.typing as npt
import torch

from . import cpu_fp8
from .fp8_copy import Fp8Copy, checked, layout_of, whole
from .paged import PagedKV


def fp8_chunk_bytes(kv: PagedKV, pages_per_chunk: int) -> int:
    """Of a quantised chunk, its scales included. kv.dtype is bfloat16, float16 or float32."""
    return layout_of(kv, pages_per_chunk).size_bytes


def gather_fp8(
    kv: PagedKV,
    pages: npt.ArrayLike,
    chunks: torch.Tensor,
    *,
    pages_per_chunk: int,
    places: npt.ArrayLike | None = None,
) -> None:
    """Quantise page pages[i] of every plane into place places[i] of `chunks`; one launch on a GPU.

    chunks: (num_chunks, fp8_chunk_bytes) uint8 on the device of `kv`; rows may lie apart, at
        multiples of 16 bytes.
    places: page p of chunk c is place c * pages_per_chunk + p; 0, 1, 2, … unless given. In any
        order, but each chunk that appears must be whole: its scales depend on all its pages.

    ValueError if an argument does not fit, before anything is written. On a GPU this only launches,
    on the current stream: whoever owns that keeps `kv` and `chunks` as they are until it is done.
    """
    copy = whole(checked(kv, pages, chunks, pages_per_chunk, places))
    if len(copy.pages):
        _backend(kv.device).gather(copy)


def scatter_fp8(
    chunks: torch.Tensor,
    kv: PagedKV,
    pages: npt.ArrayLike,
    *,
    pages_per_chunk: int,
    places: npt.ArrayLike | None = None,
) -> None:
    """The reverse, of any of a chunk's pages: they must differ from each other, places may repeat.

    Raises and launches like `gather_fp8`. A repeated page ends up with any one of its contents, or
    a mixture of them.
    """
    copy = checked(kv, pages, chunks, pages_per_chunk, places)
    if len(copy.pages):
        _backend(kv.device).scatter(copy)


class _Backend(Protocol):
    """A copy of at least one page, either way; a gather's is whole."""

    def gather(self, copy: Fp8Copy) -> None: ...

    def scatter(self, copy: Fp8Copy) -> None: ...


def _backend(device: torch.device) -> _Backend:
    if device.type == "cpu":
        return cpu_fp8
    if device.type == "cuda":
        from . import cuda_fp8  # needs CuPy, which is only there with CUDA

        return cuda_fp8
    raise ValueError(f"kv is on {device}, must be on cpu or cuda")
