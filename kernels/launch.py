"""What csrc/copy.cu is launched with. Pure numbers: needs neither CuPy nor a GPU."""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from .page_copy import PageCopy
from .paged import PagedKV, page_bytes

Words = npt.NDArray[np.int64]

BLOCK = 256
"""Threads."""

_PART_BYTES = 32 << 10
"""Most of a page that one group of threads copies: large pages are shared by several."""

_THREAD_BYTES = 64
"""What a thread has under way at once: four of the widest words."""


@dataclass(frozen=True, slots=True)
class Launch:
    """words: what the kernel reads from the device: planes, pages and places."""

    grid: int
    block: int
    words: Words
    numbers: tuple[int, ...]

    def arguments(self, words_address: int) -> tuple[int, ...]:
        """Of the kernel, all of 64 bits, for words at that address."""
        return (words_address, *self.numbers)


def plan(copy: PageCopy, *, most_blocks: int, block: int = BLOCK) -> Launch:
    """Of either kernel, for at least one page. block: a power of two."""
    table = _table(copy.kv)
    part_bytes = np.minimum(table["part_pieces"] * table["piece_bytes"], table["page_bytes"])
    group = min(block, _threads(int(part_bytes.max())))
    table["lanes"] = np.minimum(table["lanes"], group)
    num_parts = int(np.ceil(table["num_pieces"] / table["part_pieces"]).max())
    num_units = len(table) * len(copy.pages) * num_parts
    return Launch(
        grid=min(most_blocks, -(-num_units * group // block)),
        block=block,
        words=np.concatenate([table.view(np.int64), copy.pages, copy.places]),
        numbers=(
            len(table),
            len(copy.pages),
            num_parts,
            copy.chunks.data_ptr(),
            copy.chunks.stride(0),
            copy.pages_per_chunk,
            group,
        ),
    )


_PLANE = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("address", "page_stride", "row_stride", "piece_stride", "row_pieces", "num_pieces"),
            *("piece_bytes", "page_bytes", "part_pieces", "lanes", "offset"),
        )
    ]
)
"""As copy.cu has it."""

_TABLES: WeakKeyDictionary[PagedKV, npt.NDArray[np.void]] = WeakKeyDictionary()
"""Where planes lie never changes, and takes longer to find out than to copy."""


def _table(kv: PagedKV) -> npt.NDArray[np.void]:
    if kv not in _TABLES:
        sizes = [page_bytes(plane) for plane in kv.planes]
        offsets = np.cumsum([0, *sizes])
        rows = [(*_row(plane), offset) for plane, offset in zip(kv.planes, offsets, strict=False)]
        _TABLES[kv] = np.array(rows, _PLANE)
    return _TABLES[kv].copy()


def _row(plane: torch.Tensor) -> tuple[int, ...]:
    """All of a plane but its offset, in pieces as long as its memory allows."""
    size = page_bytes(plane)
    row_stride, piece_stride, row_pieces, num_pieces, piece_bytes = _pieces(plane, size)
    part_pieces = max(1, _PART_BYTES // piece_bytes)
    return (
        *(plane.data_ptr(), plane.stride(0), row_stride, piece_stride, row_pieces, num_pieces),
        *(piece_bytes, size, part_pieces, _threads(piece_bytes)),
    )


def _pieces(plane: torch.Tensor, size: int) -> tuple[int, int, int, int, int]:
    """(row_stride, piece_stride, row_pieces, num_pieces, piece_bytes) of a page."""
    _, tokens, heads, head_bytes = plane.shape
    _, token_stride, head_stride, _ = plane.stride()
    if heads > 1 and head_stride != head_bytes:
        return token_stride, head_stride, heads, tokens * heads, head_bytes
    token_bytes = heads * head_bytes
    if tokens > 1 and token_stride != token_bytes:
        return token_stride, 0, 1, tokens, token_bytes
    piece_bytes = min(size, _PART_BYTES)
    num_pieces = -(-size // piece_bytes)
    return 0, piece_bytes, num_pieces, num_pieces, piece_bytes


def _threads(num_bytes: int) -> int:
    """A power of two, at most the threads that so many bytes keep busy."""
    return 1 << (max(1, num_bytes // _THREAD_BYTES).bit_length() - 1)
