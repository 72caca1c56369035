"""Quantised gather and scatter in CPU memory: a chunk's share of one plane at a time.

Byte for byte what csrc/fp8.cu does.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from .e4m3 import WORDS, dequantised, quantised, scales_for, widen
from .fp8_copy import Fp8Copy

Rows = npt.NDArray[Any]


def gather(copy: Fp8Copy) -> None:
    layout, chunks = copy.layout, copy.chunks.detach().numpy()
    for row, pages, _ in _by_chunk(copy):
        for words, codes, scales in _planes(copy, chunks[row]):
            bits = widen(words[pages], copy.dtype)
            found = scales_for(bits, axes=(0, 1, 3))
            codes[...] = quantised(bits, found)
            scales[...] = found.ravel()
        # Chunks of equal KV are equal, whatever was in the row.
        chunks[row, layout.payload_bytes : layout.scales[0]] = 0


def scatter(copy: Fp8Copy) -> None:
    chunks = copy.chunks.detach().numpy()
    for row, pages, places in _by_chunk(copy):
        for words, codes, scales in _planes(copy, chunks[row]):
            table = dequantised(scales, copy.dtype).ravel()
            heads = np.arange(len(scales)) * 256
            words[pages] = table[codes[places] + heads[:, None]]


def _by_chunk(copy: Fp8Copy) -> Iterator[tuple[int, Rows, Rows]]:
    """(row, pages, places) of each chunk."""
    for row in np.unique(copy.rows).tolist():
        of_row = copy.rows == row
        yield row, copy.pages[of_row], copy.places[of_row]


def _planes(copy: Fp8Copy, chunk: Rows) -> Iterator[tuple[Rows, Rows, Rows]]:
    """(words, codes, scales) of each plane: (num_pages, tokens, heads, head_dim) of the pages, as
    many of the chunk, and (heads,); they share the memory of both."""
    layout = copy.layout
    for plane, start, at in zip(copy.kv.planes, layout.payload, layout.scales, strict=True):
        words = plane.numpy().view(WORDS[copy.dtype])
        shape = (copy.pages_per_chunk, *words.shape[1:])
        codes = chunk[start : start + int(np.prod(shape))].reshape(shape)
        yield words, codes, chunk[at : at + 4 * shape[2]].view(np.float32)
