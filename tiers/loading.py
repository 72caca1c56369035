"""Read-up: pins what is in DRAM, reads what is on NVMe into DRAM slots, and lets admission decide
on release which of those stay."""

import time

from ..admission.base import Boundary, Chain, Key, Tier
from .base import Load, LoadState
from .cold import ColdTiers
from .dram import ChunkState, DramChunk
from .io.base import Status
from .load_times import NOT_WORTH_LOADING
from .loads import LoadBook
from .nvme import ReadDone

NO_ROOM = "no slot or no queue is free to read it"


class Loading:
    def __init__(self, cold: ColdTiers, timeout_s: float) -> None:
        self._cold = cold
        self._timeout_s = timeout_s
        self._loads = LoadBook()

    def __len__(self) -> int:
        """Loads prepared and not yet completed."""
        return len(self._loads)

    def prepare(self, chain: Chain, start: int) -> Load:
        cold = self._cold
        found = cold.run(chain, start)
        tiers = found[: cold.load_times.take(chain, start, found)]
        stop = start + len(tiers)
        load = Load(chain, start, stop, tuple(tiers), time.monotonic() + self._timeout_s)
        cut = len(tiers) < len(found)
        load.why_not = NOT_WORTH_LOADING if cut else cold.why_ends(chain, stop)
        here = list(cold.dram.find(chain[start:stop]))
        pinned = list(filter(None, here))
        cold.dram.pin(*pinned)  # before anything is staged: making room must evict none of these
        if Tier.NVME in tiers:
            below = [key for key, chunk in zip(chain[start:stop], here, strict=True) if not chunk]
            with cold.nvme.kept(below):
                self._read(load, here)
        else:
            load.chunks = pinned
        self._loads.open(load)
        return load

    def complete(self, load: Load, used: bool) -> None:
        if load.state is LoadState.READY:
            if used:
                self._cold.touch(load.keys, load.stop, hits=1)
                self._count(load)
            self._promote(load)
        self._cold.dram.unpin(*load.chunks)
        self._loads.close(load)

    def apply(self, done: ReadDone) -> None:
        """A read ended: its chunk becomes readable, or the loads that wait for it end before it."""
        dram = self._cold.dram
        chunk = dram.at(done.slot)
        if done.status is Status.OK:
            dram.settle(chunk, ChunkState.CLEAN)
            for load in self._loads.arrived(done.slot):
                self._cold.load_times.observe_load(load, time.monotonic())
            return
        self._loads.failed(done.slot, done.status.name.lower())
        dram.detach(chunk)
        dram.settle(chunk, ChunkState.UNBACKED)

    def expire(self) -> None:
        now_s = time.monotonic()
        for load in self._loads.expire(now_s):
            self._cold.metrics.late_loads += 1
            self._cold.load_times.observe_load(load, now_s)

    def cut_all(self, why: str) -> None:
        self._loads.cut_all(why)

    def _read(self, load: Load, here: list[DramChunk | None]) -> None:
        """Begin to read what of the run is not here, and shorten it to what has room."""
        for index, chunk in enumerate(here, load.start):
            if index >= load.stop:
                break
            pinned = chunk or self._stage(load, index)
            while pinned is None and load.stop > index + 1:
                self._shorten(load, here[load.stop - 1 - load.start])
                pinned = self._stage(load, index)
            if pinned is None:
                load.stop, load.why_not = index, NO_ROOM
            else:
                load.chunks.append(pinned)
        load.missing = {i for i, chunk in enumerate(load.chunks, load.start) if not chunk.readable}
        self._cold.nvme.submit()

    def _stage(self, load: Load, index: int) -> DramChunk | None:
        """A pinned slot with a read into it under way."""
        dram, nvme, key = self._cold.dram, self._cold.nvme, load.keys[index]
        num_tokens, parent = nvme.describe(key)
        chunk = self._cold.reserve(key, parent, num_tokens, ChunkState.READING)
        if chunk is None:
            return None
        chunk.beside = index == 0 and parent is not None  # a chain's head hangs from nothing
        if not nvme.plan_read(key, chunk.slot):
            dram.detach(chunk)
            dram.settle(chunk, ChunkState.UNBACKED)  # free again
            return None
        dram.pin(chunk)
        return chunk

    def _shorten(self, load: Load, last: DramChunk | None) -> None:
        """Give up the last chunk of the run, and its slot, for one before it."""
        load.stop, load.why_not = load.stop - 1, NO_ROOM
        if last is not None:
            self._cold.dram.unpin(last)

    def _promote(self, load: Load) -> None:
        staged = {
            index: chunk
            for index, chunk in enumerate(load.chunks, load.start)
            if chunk.staged and chunk.readable and not chunk.detached
        }
        if not staged:
            return
        stop = self._promotable(load, min(staged))
        for index, chunk in staged.items():
            if index < stop and (chunk.parent is None or self._cold.expects(chunk.parent)):
                self._cold.dram.admit(chunk)
                self._cold.metrics.promoted_chunks += 1

    def _promotable(self, load: Load, first: int) -> int:
        """How far the run from its first staged chunk on may stay in DRAM."""
        anchor = _anchor(load)
        if anchor is None:
            chain = load.keys[: load.stop]
            return self._cold.offers.ask(Boundary.NVME_TO_DRAM, chain, first).stop
        above = self._cold.dram.get(anchor)
        return first if above is None or above.staged else load.stop

    def _count(self, load: Load) -> None:
        """A chunk beside another serves the same tokens: they count once."""
        metrics, num_served = self._cold.metrics, load.stop - load.start
        served, tiers = load.chunks[:num_served], load.tiers[:num_served]
        for chunk in served:
            chunk.promoted = False
        for tier in (Tier.DRAM, Tier.NVME):
            metrics.hit_chunks[tier] += tiers.count(tier)
            if _anchor(load) is None:
                found = zip(served, tiers, strict=True)
                metrics.hit_tokens[tier] += sum(c.num_tokens for c, t in found if t is tier)
        metrics.missed_chunks += len(load.keys) - load.stop


def _anchor(load: Load) -> Key | None:
    """The chunk that a load's only chunk hangs beside; None for a chain, whose head has none."""
    return load.chunks[0].parent if load.chunks and load.start == 0 else None
