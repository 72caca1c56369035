"""Copies between a model's cache, the page pool, and the store's slots.

    pool  <---- engine's stream ---->  cache  ---- write lanes ---->  slots
                                              <---- load lanes -----  slots, or rows on the device

The host waits for none of them but where it says so.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import repeat

import numpy as np
import numpy.typing as npt
import torch

from ..kernels import PagedKV, gather, scatter
from ..tiers.base import ChainJob, Key, Load, Tier
from ..tiers.config import StoreConfig
from ..tiers.device import Device
from ..tiers.gpu_direct import DirectRead
from ..tiers.loading import NO_ROOM
from ..tiers.movers import ChunkCopy, aligned
from ..tiers.store import TieredStore
from ..tiers.transfer import CopyJob, Transfer
from .arriving_cache import ArrivingKV
from .direct_copies import open_direct

_log = logging.getLogger(__name__)

_STAGED_CHUNKS = 4
_STAGED_BYTES = 64 << 20
"""Of a staging buffer, at most, where a chunk is no larger: a link is as fast as it gets with much
less, and what buffers take the model cannot have."""

Pages = npt.NDArray[np.int64]


class ColdCopies:
    """Owns what the store lends for a copy, pinned chunks, reserved slots or files that are read
    into rows, and gives it back once: when a poll finds the copy done. The store must outlive it.

    config: the store's. place: where the KV of `device` is.
    """

    def __init__(
        self, store: TieredStore, config: StoreConfig, device: Device, place: torch.device
    ) -> None:
        self._store = store
        self._step = store.layout.chunk_tokens
        chunk_bytes = aligned(store.layout.chunk_bytes)
        staging_bytes = max(chunk_bytes, min(_STAGED_CHUNKS * chunk_bytes, _STAGED_BYTES))
        self._transfer = Transfer(device, staging_bytes=staging_bytes)
        # After the transfer, which cannot do without its buffers.
        self._direct = open_direct(store, config, device, place)
        self._underway: dict[CopyJob, Load | DirectRead | ChainJob] = {}

    @property
    def loading(self) -> bool:
        """Whether any load was under way when last polled."""
        return any(job.loads for job in self._underway)

    def load(self, keys: Sequence[Key], kv: ArrivingKV) -> Counter[Tier]:
        """Extend `kv` by what the store holds of the chunks of `keys`; how many tokens come from
        where. Waits until they are read from the disk, and copied only where DRAM, or the rows, are
        too few for all."""
        by_tier = Counter[Tier]()
        while (start := kv.num_tokens // self._step) < len(keys):
            read = self._direct.begin(keys, start) if self._direct else None
            if read:
                by_tier += self._load_direct(read, keys, kv)
                stop = read.load.start + len(read.load.files)
                if kv.num_tokens < stop * self._step:
                    break
                full = Tier.NVME in self._store.lookup(keys, stop).tiers
            else:
                load = self._store.prepare_load(keys, start)
                found = self._load(load, kv)
                by_tier += found
                if load.why_not != NO_ROOM or not found:
                    break
                full = True
            if full:  # DRAM, or the rows: what comes next needs some of these
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
            if self._direct:
                last.callback(self._direct.close)
            last.callback(self._give_up)
            last.callback(self._transfer.close)
            self.wait()

    def _load_direct(self, read: DirectRead, keys: Sequence[Key], kv: ArrivingKV) -> Counter[Tier]:
        """While files are read, what DRAM has of the chunks before them comes from there."""
        by_tier, first = Counter[Tier](), read.load.start
        with ExitStack() as unused:
            unused.callback(self._give_back, read, used=False)
            if (start := kv.num_tokens // self._step) < first:
                by_tier += self._load(self._store.prepare_load(keys[:first], start), kv)
            if kv.num_tokens // self._step == first:  # else the device refused those
                unused.pop_all()
                by_tier += self._load(read, kv)
        return by_tier

    def _load(self, lent: Load | DirectRead, kv: ArrivingKV) -> Counter[Tier]:
        copies, job = list[ChunkCopy](), None
        start = lent.start if isinstance(lent, Load) else lent.load.start
        try:
            views = enumerate(self._views(lent), start)
            # The first tokens of the first chunk may be there already, from the page pool.
            copies = [self._copy(kv.pages, kv.num_tokens, index, view) for index, view in views]
            job = self._launch(copies)
        finally:
            if job is None:  # nothing of it is under way: the transfer has seen to that
                self._give_back(lent, used=False)
        if job is None:
            return Counter()
        self._underway[job] = lent
        by_tier = Counter[Tier]()
        tiers = lent.tiers if isinstance(lent, Load) else repeat(Tier.NVME)
        for tier, copy in zip(tiers, copies, strict=False):
            by_tier[tier] += len(copy.pages)
        kv.extend(by_tier.total(), job)
        self.poll()
        return by_tier

    def _views(self, lent: Load | DirectRead) -> list[torch.Tensor]:
        """Of what arrived, once all is read and verified that will be."""
        if isinstance(lent, Load):
            self._store.wait_load(lent)
            return self._store.load_views(lent)
        assert self._direct is not None
        self._direct.wait(lent)
        return self._direct.views(lent)

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
        lent = self._underway.pop(copy, None)  # None: an interrupt came before it was noted
        if isinstance(lent, ChainJob):
            self._store.complete_store(lent, success=arrived)
        elif lent is not None:
            self._give_back(lent, used=True)

    def _give_back(self, lent: Load | DirectRead, *, used: bool) -> None:
        if isinstance(lent, Load):
            self._store.complete_load(lent, used)
        else:
            assert self._direct is not None
            self._direct.complete(lent, used)


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
