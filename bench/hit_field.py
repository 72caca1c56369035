"""Where the rivals of one chunk size run: the same chunks on NVMe, in DRAM, and pages for them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ..admission.base import Key, Tier
from ..tiers.config import IoKind
from ..tiers.pages import PagePool
from ..tiers.store import TieredStore
from .hit_stores import Chunks, files_of, fill, open_in_place, require_tier, twin

PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Field:
    """Open stores, one for each backend, over the very same files; and the pages of an engine.

    on_nvme, in_dram, absent: chains. files: of on_nvme. page_numbers: (chunks, pages per chunk),
    the pages that each chunk of in_dram goes to, in no order. direct: O_DIRECT, or 0 without it.
    """

    chunks: Chunks
    on_nvme: list[Key]
    in_dram: list[Key]
    absent: list[Key]
    stores: dict[IoKind, TieredStore]
    files: list[Path]
    pool: PagePool
    page_numbers: npt.NDArray[np.int_]
    direct: int

    @property
    def num_chunks(self) -> int:
        """Of each of the chains that are there."""
        return len(self.on_nvme)

    @property
    def chunk_bytes(self) -> int:
        return self.chunks.layout.chunk_bytes

    def dram_addresses(self) -> list[int]:
        """Where the chunks of in_dram lie in one of the stores; nothing ever evicts them."""
        store = next(iter(self.stores.values()))
        load = store.prepare_load(self.in_dram)
        addresses = [view.data_ptr() for view in store.load_views(load)]
        store.complete_load(load)
        return addresses

    def read_slots(self, store: TieredStore, depth: int) -> list[memoryview]:
        """The slots into which the store reads `depth` chunks of on_nvme, every time: free, and
        anyone's, from complete_load to the next prepare_load."""
        load = store.prepare_load(self.on_nvme[:depth])
        store.wait_load(load)
        slots = [view.view(torch.uint8).view(-1).numpy().data for view in store.load_views(load)]
        store.complete_load(load)
        return slots

    def check(self) -> None:
        """Every store serves every chunk from the tier it should, with the right bytes."""
        for store in self.stores.values():
            for keys, tier in ((self.on_nvme, Tier.NVME), (self.in_dram, Tier.DRAM)):
                require_tier(store, keys, tier)
                for index in range(len(keys)):
                    self._check_chunk(store, keys, index)

    def _check_chunk(self, store: TieredStore, keys: list[Key], index: int) -> None:
        load = store.prepare_load(keys[: index + 1], index)
        store.wait_load(load)
        (view,) = store.load_views(load)
        assert self.chunks.is_numbered(view, index), f"the bytes of chunk {index} are wrong"
        store.complete_load(load)


@contextmanager
def open_field(
    folder: Path,
    chunks: Chunks,
    num_chunks: int,
    depths: Sequence[int],
    backends: Sequence[IoKind],
    seed: int,
) -> Iterator[Field]:
    """Fill and open the stores under `folder`, which stays the caller's to remove."""
    on_nvme = chunks.chain("on nvme", num_chunks)
    in_dram = chunks.chain("in dram", num_chunks)
    roots = [folder / name for name in backends]
    fill(roots[0], chunks, on_nvme)
    for root in roots[1:]:
        twin(roots[0], root)
    with ExitStack() as undo:
        stores: dict[IoKind, TieredStore] = {}
        for name, root in zip(backends, roots, strict=True):
            store = open_in_place(root, chunks, num_chunks + max(depths), name)
            stores[name] = undo.enter_context(store)
            chunks.put(store, in_dram)
        pool = PagePool(chunks.layout, num_chunks * 256, page_size=PAGE_TOKENS)
        pool.pages.fill_(0)  # gets its memory now, not in the first round
        order = np.random.default_rng(seed).permutation(pool.num_tokens // PAGE_TOKENS)
        field = Field(
            chunks=chunks,
            on_nvme=on_nvme,
            in_dram=in_dram,
            absent=chunks.chain("absent", max(depths)),
            stores=stores,
            files=files_of(roots[0], on_nvme),
            pool=pool,
            page_numbers=order.reshape(num_chunks, -1),
            direct=os.O_DIRECT if stores[backends[0]].stats()["o_direct"] else 0,
        )
        field.check()
        yield field
