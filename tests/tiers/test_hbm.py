"""The HBM tier, tree and page pool together, under the contract of every tier."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from rootcellar.kernels import PagedKV, gather, scatter
from rootcellar.tiers.pages import PagePool
from rootcellar.tiers.radix import RadixTree
from rootcellar.tiers.testing import TierContract, TierHarness
from rootcellar.tiers.toy import (
    CHUNK_BYTES,
    CHUNK_TOKENS,
    LAYOUT,
    Path,
    bytes_of,
    tensor_of,
    tokens_of,
)


def as_chunk(kv: torch.Tensor) -> torch.Tensor:
    return kv.view(torch.uint8).view(1, -1)


class HbmHarness(TierHarness):
    chunk_bytes = CHUNK_BYTES

    def __init__(self, num_chunks: int) -> None:
        self.tree = RadixTree()
        self.pool = PagePool(LAYOUT, num_chunks * CHUNK_TOKENS)
        self.kv = PagedKV.of_slots(self.pool.pages)

    def offer(self, path: Path) -> None:
        tokens = tokens_of(path)
        match = self.tree.match(tokens)
        self.tree.pin(match.node)
        needed = len(tokens) - match.num_tokens
        self.pool.free(self.tree.evict(max(0, needed - self.pool.num_free)))
        fitting = min(needed, self.pool.num_free) // CHUNK_TOKENS * CHUNK_TOKENS
        new = self.pool.allocate(fitting)
        assert new is not None
        for start in range(0, fitting, CHUNK_TOKENS):
            stop = match.num_tokens + start + CHUNK_TOKENS
            chunk = tensor_of(path[: stop // CHUNK_TOKENS])
            slots = new[start : start + CHUNK_TOKENS]
            scatter(as_chunk(chunk), self.kv, slots, pages_per_chunk=CHUNK_TOKENS)
        self.tree.unpin(match.node)
        held = match.num_tokens + fitting
        assert self.tree.insert(tokens[:held], np.concatenate([match.slots, new])) == (
            match.num_tokens
        )

    def held(self, path: Path) -> int:
        return self.tree.match(tokens_of(path)).num_tokens // CHUNK_TOKENS

    def read(self, path: Path) -> list[bytes]:
        slots = self.tree.match(tokens_of(path)).slots
        chunks: list[bytes] = []
        for start in range(0, len(slots) // CHUNK_TOKENS * CHUNK_TOKENS, CHUNK_TOKENS):
            out = torch.empty(LAYOUT.shape(CHUNK_TOKENS))
            of_chunk = slots[start : start + CHUNK_TOKENS]
            gather(self.kv, of_chunk, as_chunk(out), pages_per_chunk=CHUNK_TOKENS)
            chunks.append(bytes_of(out))
        return chunks

    @contextmanager
    def pinned(self, path: Path) -> Iterator[int]:
        match = self.tree.match(tokens_of(path))
        self.tree.pin(match.node)
        yield match.num_tokens // CHUNK_TOKENS
        self.tree.unpin(match.node)

    def num_held(self) -> int:
        return self.tree.num_tokens // CHUNK_TOKENS

    def check_integrity(self) -> None:
        self.tree.check_integrity()
        self.pool.check_integrity()
        held = self.tree.num_tokens + self.pool.num_free
        assert held == self.pool.pages.shape[2], "a page is neither in the tree nor free"

    def close(self) -> None:
        self.pool.free(self.tree.clear())


class TestHbmTier(TierContract):
    def make_tier(self, num_chunks: int) -> TierHarness:
        return HbmHarness(num_chunks)
