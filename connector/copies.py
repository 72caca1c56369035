"""Copies between a model's cache, the page pool, and the store's slots.

    pool  <---- engine's stream ---->  cache  ---- write lanes ---->  slots
                                              <---- load lanes -----

The host waits for none of them but where it says so.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt
import torch

from ..kernels import PagedKV, gather, scatter
from ..tiers.base import ChainJob, Key, Load, Tier
from ..tiers.device import Device
from ..tiers.loading import NO_ROOM
from ..tiers.movers import ChunkCopy, aligned
from ..tiers.store import TieredStore
from ..tiers.transfer import CopyJob, Transfer
from .arriving_cache import ArrivingKV

_log = logging.getLogger(__name__)

_STAGED_CHUNKS = 4
_STAGED_BYTES = 64 << 20
"""Of a staging buffer, at most, where a chunk is no larger: a link is as fast as it gets with much
less, and what buffers take the model cannot have."""

Pages = npt.NDArray[np.int64]


class ColdCopies:
    """Owns what the store lends for a copy, pinned chunks or reserved slots, and gives it back
    once: when a poll finds the copy done. The store must outlive it."""

    def __init__(self, store: TieredStore, device: Device) -> None:
        self._store = store
        self._step = store.layout.chunk_tokens
        chunk_bytes = aligned(store.layout.chunk_bytes)
        staging_bytes = max(chunk_bytes, min(_STAGED_CHUNKS * chunk_bytes, _STAGED_BYTES))
        self._transfer = Transfer(device, staging_bytes=staging_bytes)
        self._underway: dict[CopyJob, Load | ChainJob] = {}

    @property
    def loading(self) -> bool:
        """Whether any load was under way when last polled."""
        return any(job.loads for job in self._underway)

    def load(self, keys: Sequence[Key], kv: ArrivingKV) -> Counter[Tier]:
        """Extend `kv` by what the store holds of the chunks of `keys`; how many tokens come from
        where. Waits until they are read from the disk, and copied only where DRAM is too small."""
        by_tier = Counter[Tier]()
        while (start := kv.num_tokens // self._step) < len(keys):
            load = self._store.prepare_load(keys, start)
            found = self._load(load, kv)
            by_tier += found
            if load.why_not != NO_ROOM or not found:
                break
            # DRAM cannot hold the whole run at once: what comes next needs these slots.
            self._wait([job for job in self._underway if job.loads])
        return by_tier

    def store(self, keys: Sequence[Key], pages: PagedKV) -> None:
        """Offer the chunks of `keys`, the first of which begins at page 0. Until a poll finds them
        copied nobody may write the pages; whoever gives them away calls wait() first."""
        job = self._store.prepare_store(keys)
        try:
            slots = zip(job.wanted, self._store.store_views(job), strict=True)
            copies = [self._copy(pages, 0, index, slot) for index, slot in slots]
            self._underway[self._transfer.store(copies)] = job
        except BaseException:
            self._store.complete_store(job, success=False)
            raise
        self.poll()

    def poll(self) -> None:
        """Give back what was lent for copies that are done; never waits."""
        for copy in self._transfer.poll():
            self._settle(copy, arrived=copy.error is None)

    def wait(self) -> None:
        """Block until no copy reads or writes any pages."""
        self._wait(list(self._underway))

    def close(self) -> None:
        """Wait until all is copied, then release the device. Idempotent."""
        with ExitStack() as last:
            last.callback(self._give_up)
            last.callback(self._transfer.close)
            self.wait()

    def _load(self, load: Load, kv: ArrivingKV) -> Counter[Tier]:
        copies, job = list[ChunkCopy](), None
        try:
            self._store.wait_load(load)
            views = enumerate(self._store.load_views(load), load.start)
            # The first tokens of the first chunk may be there already, from the page pool.
            copies = [self._copy(kv.pages, kv.num_tokens, index, view) for index, view in views]
            job = self._launch(copies)
        finally:
            if job is None:  # nothing of it is under way: the transfer has seen to that
                self._store.complete_load(load, used=False)
        if job is None:
            return Counter()
        self._underway[job] = load
        by_tier = Counter[Tier]()
        for tier, copy in zip(load.tiers, copies, strict=False):
            by_tier[tier] += len(copy.pages)
        kv.extend(by_tier.total(), job)
        self.poll()
        return by_tier

    def _launch(self, copies: Sequence[ChunkCopy]) -> CopyJob | None:
        """None where the device refuses: whatever was to be loaded is a miss then."""
        try:
            return self._transfer.load(copies, by_layer=True)
        except Exception:
            _log.exception("a load was given up, its tokens are computed")
            return None

    def _copy(self, pages: PagedKV, start: int, index: int, slot: torch.Tensor) -> ChunkCopy:
        """Between that chunk's slot and its pages, from page `start` on if it begins before."""
        first = max(0, start - index * self._step)
        numbers = np.arange(index * self._step + first, (index + 1) * self._step)
        return ChunkCopy(pages, numbers, slot.view(torch.uint8).view(-1), self._step, first)

    def _wait(self, copies: Sequence[CopyJob]) -> None:
        self._transfer.wait(copies)
        self.poll()

    def _give_up(self) -> None:
        """The device has failed: what of the rest arrived cannot be known."""
        for copy in list(self._underway):
            self._settle(copy, arrived=False)

    def _settle(self, copy: CopyJob, arrived: bool) -> None:
        lent = self._underway.pop(copy)
        if isinstance(lent, Load):
            self._store.complete_load(lent)
        else:
            self._store.complete_store(lent, success=arrived)


def copy_pages(
    source: PagedKV, pages: Pages, target: PagedKV, target_pages: Pages, *, at_once: int
) -> None:
    """Page pages[i] to page target_pages[i] of another layout, at_once of them packed in between.

    On the engine's stream: both ends are its own memory, everything that reads or writes them is
    launched there in order, and so no other stream has to be waited for.
    """
    size_bytes = source.chunk_bytes(at_once)
    packed = torch.empty((1, size_bytes), dtype=torch.uint8, device=source.device)
    for at in range(0, len(pages), at_once):
        piece = slice(at, at + at_once)
        gather(source, pages[piece], packed, pages_per_chunk=at_once)
        scatter(packed, target, target_pages[piece], pages_per_chunk=at_once)
