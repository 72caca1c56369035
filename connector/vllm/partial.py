"""Stores of which vLLM left blocks out.

A chunk of a sliding-window group is offered while its last block is there, and blocks that the
window has dropped are left out of the transfer. Such a chunk must never become readable: part of
its slot would keep what lay there before, and blocks behind a gap would land in a wrong place.
"""

from collections.abc import Sequence

from vllm.v1.kv_offload.base import GPULoadStoreSpec

from .slots import SlotSpec


def fills_chunks(blocks: GPULoadStoreSpec, slots: SlotSpec, blocks_per_chunk: int) -> bool:
    """Whether every block of every chunk is there."""
    return len(blocks.block_ids) == len(slots.slots) * blocks_per_chunk


def whole_groups(
    blocks: GPULoadStoreSpec, chunks: Sequence[int], blocks_per_chunk: int
) -> list[bool]:
    """For each group, whether all blocks of its chunks are there; chunks: how many it has."""
    return [
        size == num_chunks * blocks_per_chunk
        for size, num_chunks in zip(blocks.group_sizes, chunks, strict=True)
    ]


def keep_groups(
    blocks: GPULoadStoreSpec, slots: SlotSpec, chunks: Sequence[int], keep: Sequence[bool]
) -> tuple[GPULoadStoreSpec, SlotSpec]:
    """The same transfer without the groups that are not kept."""
    kept_blocks: list[int] = []
    kept_slots: list[int] = []
    block = slot = 0
    for size, num_chunks, kept in zip(blocks.group_sizes, chunks, keep, strict=True):
        if kept:
            kept_blocks += blocks.block_ids[block : block + size].tolist()
            kept_slots += slots.slots[slot : slot + num_chunks]
        block, slot = block + size, slot + num_chunks
    sizes = [size if kept else 0 for size, kept in zip(blocks.group_sizes, keep, strict=True)]
    trimmed = GPULoadStoreSpec(kept_blocks, sizes, blocks.block_indices)
    return trimmed, SlotSpec(slots.arena, tuple(kept_slots))
