"""Read-up: pins what is in DRAM, reads what is on NVMe into DRAM slots, and lets admission decide
on release which of those stay."""

import time

from ..admission.base import Boundary, Key
from .base import Load, LoadState
from .cold import ColdTiers
from .dram import ChunkState, DramChunk
from .io.base import Status
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

    def prepare(self, chain: list[Key], start: int) -> Load:
        cold, dram = self._cold, self._cold.dram
        tiers = cold.run(chain, start)
        stop = start + len(tiers)
        load = Load(chain, start, stop, tuple(tiers), time.monotonic() + self._timeout_s)
        load.why_not = cold.why_ends(chain, stop)
        cold.touch(chain, stop, hits=1)
        here = [dram.get(key) for key in chain[start:stop]]
        for chunk in here:  # before anything is staged: making room must evict none of these
            if chunk is not None:
                dram.pin(chunk)
        for index, chunk in enumerate(here, start):
            if index >= load.stop:
                break
            pinned = chunk or self._stage(chain[index])
            while pinned is None and load.stop > index + 1:
                self._shorten(load, here[load.stop - 1 - start])
                pinned = self._stage(chain[index])
            if pinned is None:
                load.stop, load.why_not = index, NO_ROOM
            else:
                load.chunks.append(pinned)
        load.missing = {i for i, chunk in enumerate(load.chunks, start) if not chunk.readable}
        self._loads.open(load)
        cold.nvme.submit()
        return load

    def complete(self, load: Load) -> None:
        if load.state is LoadState.READY:
            self._count(load)
            self._promote(load)
        for chunk in load.chunks:
            self._cold.dram.unpin(chunk)
        self._loads.close(load)

    def apply(self, done: ReadDone) -> None:
        """A read ended: its chunk becomes readable, or the loads that wait for it end before it."""
        dram = self._cold.dram
        chunk = dram.at(done.slot)
        if done.status is Status.OK:
            dram.settle(chunk, ChunkState.CLEAN)
            self._loads.arrived(done.slot)
            return
        self._loads.failed(done.slot, done.status.name.lower())
        dram.detach(chunk)
        dram.settle(chunk, ChunkState.UNBACKED)

    def expire(self) -> None:
        self._cold.metrics.late_loads += self._loads.expire(time.monotonic())

    def cut_all(self, why: str) -> None:
        self._loads.cut_all(why)

    def _stage(self, key: Key) -> DramChunk | None:
        """A pinned slot with a read into it under way."""
        dram, nvme = self._cold.dram, self._cold.nvme
        num_tokens, parent = nvme.describe(key)
        chunk = dram.reserve(key, parent, num_tokens, ChunkState.READING)
        if chunk is None:
            return None
        if not nvme.plan_read(key, chunk.slot):
            dram.settle(chunk, ChunkState.UNBACKED)  # staged and unpinned: free again
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
        chain = load.keys[: load.stop]
        stop = self._cold.admitted(Boundary.NVME_TO_DRAM, chain, min(staged))
        for index, chunk in staged.items():
            if index < stop and (chunk.parent is None or self._cold.expects(chunk.parent)):
                self._cold.dram.admit(chunk)
                self._cold.metrics.promoted_chunks += 1

    def _count(self, load: Load) -> None:
        metrics = self._cold.metrics
        served = load.chunks[: load.stop - load.start]
        for tier, chunk in zip(load.tiers, served, strict=False):
            metrics.hit_chunks[tier] += 1
            metrics.hit_tokens[tier] += chunk.num_tokens
        metrics.missed_chunks += len(load.keys) - load.stop
