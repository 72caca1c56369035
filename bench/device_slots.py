"""Chunks in main memory as the DRAM tier has them, and pages that are copied there and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from ..kernels import PagedKV
from ..tiers.arena import PAGE_BYTES, SharedArena
from ..tiers.cuda_runtime import TorchRuntime, current_pci_address
from ..tiers.movers import ChunkCopy
from ..tiers.numa import gpu_node
from ..tiers.pinning import ArenaPinner
from .device_pages import Pages

_PATIENCE_S = 60.0
_PAGES_PER_CHUNK = 16


@contextmanager
def slots(device: torch.device, size_bytes: int) -> Iterator[torch.Tensor]:
    """(size_bytes,) uint8 of an arena, near the GPU and pinned for it where there is one.

    No copy may be under way when the block ends. OSError if the memory cannot be had, or pinned.
    """
    arena = SharedArena(
        -(-size_bytes // PAGE_BYTES) * PAGE_BYTES, 1, gpu_node(current_pci_address())
    )
    pinner = ArenaPinner(arena, TorchRuntime(device)) if device.type == "cuda" else None
    try:
        if not arena.wait_touched(1, _PATIENCE_S):
            raise OSError(f"no {size_bytes} bytes of shared memory: {arena.populate_error}")
        if pinner is not None and not (pinner.wait(_PATIENCE_S) and arena.pinned_slots):
            raise OSError(f"{size_bytes} bytes cannot be pinned: see rootcellar doctor")
        yield torch.from_numpy(np.frombuffer(arena.buffer, np.uint8, size_bytes))
    finally:
        if pinner is not None:
            pinner.close()
        arena.close()


@dataclass(frozen=True, slots=True)
class Form:
    """Chunks of one size, of pages of one size, that lie apart in planes."""

    chunk_bytes: int
    page_bytes: int

    @property
    def pages_per_chunk(self) -> int:
        return min(_PAGES_PER_CHUNK, self.chunk_bytes // self.page_bytes)

    @property
    def num_planes(self) -> int:
        return self.chunk_bytes // self.page_bytes // self.pages_per_chunk

    def kv(self, memory: torch.Tensor) -> PagedKV:
        return PagedKV.of_rows(list(memory.view(self.num_planes, -1, self.page_bytes)))

    def pages(self, num_chunks: int, seed: int) -> Pages:
        """(num_chunks, pages_per_chunk), in no order, each page once."""
        order = np.random.default_rng(seed).permutation(num_chunks * self.pages_per_chunk)
        return order.reshape(num_chunks, -1).astype(np.int64)

    def copies(self, memory: torch.Tensor, slots: torch.Tensor, seed: int) -> list[ChunkCopy]:
        """All of `memory`, page by page, to and from chunks side by side in `slots`."""
        kv, num_chunks = self.kv(memory), len(slots) // self.chunk_bytes
        places = zip(self.pages(num_chunks, seed), slots.view(num_chunks, -1), strict=True)
        return [ChunkCopy(kv, pages, slot, self.pages_per_chunk) for pages, slot in places]

    def packed(self, memory: torch.Tensor, num_chunks: int, seed: int) -> torch.Tensor:
        """What those copies make of all slots, said in torch's indexing."""
        planes = memory.view(self.num_planes, -1, self.page_bytes)
        pages = torch.from_numpy(self.pages(num_chunks, seed)).to(memory.device)
        return planes[:, pages].transpose(0, 1).reshape(-1)
