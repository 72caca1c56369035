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
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)

from .slots import SlotSpec

Blocks = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RefPages:
    """pages: (num_blocks, page_bytes) uint8, a view of the engine's memory; rows may lie apart.
    offset: of the ref's first page in a rank's slice, bytes."""

    pages: torch.Tensor
    offset: int


@dataclass(frozen=True, slots=True)
class ChunkCopy:
    """Page blocks[i] of every ref of the group is page first + i of the chunk in the slot."""

    group: int
    slot: int
    first: int
    blocks: Blocks


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
        self.groups = [self._place(refs, tensors) for refs in kv_caches.group_data_refs]
        self.group_bytes = [self._group_bytes(refs) for refs in self.groups]
        """Of a group's chunk in a rank's slice."""
        for group, size_bytes in enumerate(self.group_bytes):
            if size_bytes > rank_bytes:
                raise ValueError(
                    f"a chunk of KV-cache group {group} takes {size_bytes} bytes per rank, "
                    f"rank_bytes is {rank_bytes}"
                )

    def copies(self, blocks: GPULoadStoreSpec, slots: SlotSpec) -> list[ChunkCopy]:
        """The transfer chunk by chunk. ValueError if blocks and slots do not belong together, or
        if one of them does not exist."""
        sizes, indices = blocks.group_sizes, blocks.block_indices
        if len(sizes) != len(self.groups):
            raise ValueError(f"{len(sizes)} KV-cache groups, must be {len(self.groups)}")
        ids = blocks.block_ids.astype(np.int64)
        _check_range("block", ids.tolist(), self.num_blocks)
        _check_range("slot", slots.slots, slots.arena.num_slots)
        pieces = [
            (group, first, piece)
            for group, run in enumerate(_split(ids, sizes))
            for first, piece in self._chunked(indices[group] % self.blocks_per_chunk, run)
        ]
        if len(pieces) != len(slots.slots):
            raise ValueError(
                f"{len(slots.slots)} slots for {len(pieces)} chunks: group sizes {list(sizes)}, "
                f"block indices {list(indices)}, {self.blocks_per_chunk} blocks per chunk"
            )
        return [
            ChunkCopy(group, slot, first, piece)
            for slot, (group, first, piece) in zip(slots.slots, pieces, strict=True)
        ]

    def moved_bytes(self, copies: Sequence[ChunkCopy]) -> int:
        per_block = [size_bytes // self.blocks_per_chunk for size_bytes in self.group_bytes]
        return sum(len(copy.blocks) * per_block[copy.group] for copy in copies)

    def _place(
        self, refs: Sequence[CanonicalKVCacheRef], tensors: Sequence[torch.Tensor]
    ) -> list[RefPages]:
        placed: list[RefPages] = []
        offset = 0
        for ref in refs:
            tensor = tensors[ref.tensor_idx]
            if not 0 < ref.page_size_bytes <= tensor.shape[1]:
                raise ValueError(
                    f"a page is {ref.page_size_bytes} bytes, must be from 1 to {tensor.shape[1]}"
                )
            placed.append(RefPages(tensor[:, : ref.page_size_bytes], offset))
            offset += ref.page_size_bytes * self.blocks_per_chunk
        return placed

    def _group_bytes(self, refs: Sequence[RefPages]) -> int:
        return sum(ref.pages.shape[1] for ref in refs) * self.blocks_per_chunk

    def _chunked(self, first: int, run: Blocks) -> Iterator[tuple[int, Blocks]]:
        """(first, blocks) per chunk of a group whose first block is page `first` of its chunk."""
        start = 0
        while start < len(run):
            piece = run[start : start + self.blocks_per_chunk - first]
            yield first, piece
            start, first = start + len(piece), 0


def page_runs(copy: ChunkCopy) -> list[tuple[int, int, int]]:
    """(page, block, count): `count` pages that follow each other in the chunk and in the engine."""
    runs: list[tuple[int, int, int]] = []
    for page, block in enumerate(copy.blocks.tolist(), copy.first):
        if runs and block == runs[-1][1] + runs[-1][2]:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((page, block, 1))
    return runs


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


def _check_range(name: str, values: Sequence[int], stop: int) -> None:
    wrong = next((value for value in values if not 0 <= value < stop), None)
    if wrong is not None:
        raise ValueError(f"{name} is {wrong}, must be from 0 to {stop - 1}")
