"""What csrc/xxh3.cu is launched with, and the two launches, on torch's current stream."""

from dataclasses import dataclass

import torch

from .cuda import device_index, start
from .xxh3 import DIGEST_BYTES

BLOCK = 128
"""Threads that find sums; a multiple of the four that share one."""

_BLOCK_BYTES = 1024
_SUM_WORDS = 8
_SUMMERS = 4
_AHEAD = 16
_WARP = 32
"""As in xxh3.cu; of a warp, what one row takes to fold its sums."""


@dataclass(frozen=True, slots=True)
class Step:
    """A launch; arguments are all of 64 bits."""

    kernel: str
    grid: int
    block: int
    arguments: tuple[int, ...]


def digests(rows: torch.Tensor) -> torch.Tensor:
    index = device_index(rows.device)
    with torch.cuda.device(index):
        found = rows.new_empty((len(rows), DIGEST_BYTES))
        # Both of this stream's memory: what uses the sums next comes behind the kernels.
        sums = rows.new_empty(sum_words(rows), dtype=torch.int64)
        for step in plan(rows, sums.data_ptr(), found.data_ptr()):
            start("xxh3.cu", step.kernel, index, step.grid, step.block, step.arguments)
    return found


def plan(rows: torch.Tensor, sums: int, found: int, *, block: int = BLOCK) -> tuple[Step, ...]:
    """In order, for at least one row; none otherwise. sums: where sum_words(rows) words may go."""
    if not len(rows):
        return ()
    row_bytes = rows.shape[1]
    each = -(-_num_sums(row_bytes) * _SUMMERS // block)
    at, row_stride = rows.data_ptr(), rows.stride(0)
    return (
        Step("xxh3_sums", len(rows) * each, block, (at, row_stride, row_bytes, sums, each)),
        Step("xxh3_fold", len(rows), _WARP, (sums, row_bytes, found)),
    )


def sum_words(rows: torch.Tensor) -> int:
    """Of 64 bits. Folding asks for sums ahead of what it needs, also behind the last row's."""
    return (len(rows) * _num_sums(rows.shape[1]) + _AHEAD) * _SUM_WORDS


def _num_sums(row_bytes: int) -> int:
    return (row_bytes - 1) // _BLOCK_BYTES + 1
