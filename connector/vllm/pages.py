"""Which bytes of which slot belong to which of the engine's pages.

A slot holds one chunk of one KV-cache group: a slice of rank_bytes per rank, or a single one where
all ranks hold the same bytes. In a slice, a chunk's pages lie ref after ref, block after block:

    |<- ref 0: blocks_per_chunk pages ->|<- ref 1: blocks_per_chunk pages ->| ... | unused |
    | page 0 | page 1 | ...             | page 0 | page 1 | ...             |

A transfer lists blocks and slots group by group. The blocks of a group follow each other, so only
its first chunk may begin, and only its last may end, in the middle:

    chunks    |  .   b0   b1 | b2   b3   b4 | b5   .    .  |    blocks_per_chunk 3, block index 1
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)

from ...kernels import PagedKV
from ...tiers.movers import ChunkCopy
from .slots import SlotSpec

Blocks = npt.NDArray[np.int64]


class PageLayout:
    """The pages of one rank and their places in a slot. ValueError if they do not fit in there.

    rank_bytes: a rank's slice of a slot. replicated: all ranks share the first slice.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        *,
        blocks_per_chunk: int,
        rank: int,
        rank_bytes: int,
        replicated: bool,
    ) -> None:
        if blocks_per_chunk < 1:
            raise ValueError(f"blocks_per_chunk is {blocks_per_chunk}, must be at least 1")
        self.blocks_per_chunk = blocks_per_chunk
        self.slice_start = 0 if replicated else rank * rank_bytes
        """Of this rank in a slot, bytes."""
        self.slice_stop = self.slice_start + rank_bytes
        tensors = [_as_bytes(index, cache) for index, cache in enumerate(kv_caches.tensors)]
        self.num_blocks = min(tensor.shape[0] for tensor in tensors)
        self.groups = [_planes(refs, tensors) for refs in kv_caches.group_data_refs]
        for group, kv in enumerate(self.groups):
            if (size_bytes := kv.chunk_bytes(blocks_per_chunk)) > rank_bytes:
                raise ValueError(
                    f"a chunk of KV-cache group {group} takes {size_bytes} bytes per rank, "
                    f"rank_bytes is {rank_bytes}"
                )

    def copies(
        self, blocks: GPULoadStoreSpec, slots: SlotSpec, memory: torch.Tensor
    ) -> list[ChunkCopy]:
        """The transfer chunk by chunk. memory: (num_slots, slot_bytes) of the arena. ValueError if
        blocks and slots do not belong together, or if one of them does not exist."""
        sizes, indices = blocks.group_sizes, blocks.block_indices
        if len(sizes) != len(self.groups):
            raise ValueError(f"{len(sizes)} KV-cache groups, must be {len(self.groups)}")
        ids = blocks.block_ids.astype(np.int64)
        _check_range("block", ids, self.num_blocks)
        _check_range("slot", np.array(slots.slots, np.int64), len(memory))
        pieces = [
            (kv, first, piece)
            for kv, index, run in zip(self.groups, indices, _split(ids, sizes), strict=True)
            for first, piece in self._chunked(index % self.blocks_per_chunk, run)
        ]
        if len(pieces) != len(slots.slots):
            raise ValueError(
                f"{len(slots.slots)} slots for {len(pieces)} chunks: group sizes {list(sizes)}, "
                f"block indices {list(indices)}, {self.blocks_per_chunk} blocks per chunk"
            )
        n, mine = self.blocks_per_chunk, memory[:, self.slice_start : self.slice_stop]
        return [
            ChunkCopy(kv, piece, mine[slot, : kv.chunk_bytes(n)], n, first)
            for slot, (kv, first, piece) in zip(slots.slots, pieces, strict=True)
        ]

    def _chunked(self, first: int, run: Blocks) -> Iterator[tuple[int, Blocks]]:
        """(first, blocks) per chunk of a group whose first block is page `first` of its chunk."""
        start = 0
        while start < len(run):
            piece = run[start : start + self.blocks_per_chunk - first]
            yield first, piece
            start, first = start + len(piece), 0


def _planes(refs: Sequence[CanonicalKVCacheRef], tensors: Sequence[torch.Tensor]) -> PagedKV:
    """A plane per ref: the part of its tensor's rows that is a page."""
    rows: list[torch.Tensor] = []
    for ref in refs:
        tensor, size_bytes = tensors[ref.tensor_idx], ref.page_size_bytes
        if not 0 < size_bytes <= tensor.shape[1]:
            raise ValueError(f"a page is {size_bytes} bytes, must be from 1 to {tensor.shape[1]}")
        rows.append(tensor[:, :size_bytes])
    return PagedKV.of_rows(rows)


def _as_bytes(index: int, cache: CanonicalKVCacheTensor) -> torch.Tensor:
    """(num_blocks, row_bytes) uint8 over the engine's own memory."""
    tensor: torch.Tensor = cache.tensor
    if tensor.dim() != 2 or tensor.element_size() != 1 or tensor.stride(1) != 1:
        raise ValueError(
            f"KV-cache tensor {index} is {tensor.dtype} {tuple(tensor.shape)} with strides "
            f"{tensor.stride()}, must be rows of bytes"
        )
    return tensor.view(torch.uint8)


def _split(ids: Blocks, sizes: Sequence[int]) -> list[Blocks]:
    return np.split(ids, np.cumsum(sizes)[:-1])


def _check_range(name: str, values: Blocks, stop: int) -> None:
    wrong = values[(values < 0) | (values >= stop)]
    if len(wrong):
        raise ValueError(f"{name} is {wrong[0]}, must be from 0 to {stop - 1}")
