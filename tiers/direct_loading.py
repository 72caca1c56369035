"""Loads that go around DRAM: which chunks are lent as files, and what becomes of them after.

Only chunks that admission would not keep in DRAM anyway: those of any other run come up through it,
so that the next request finds them there.
"""

from collections.abc import Sequence
from itertools import takewhile

from ..admission.base import Boundary, Chain, Key, Tier
from ..kernels.xxh3 import LEAST_BYTES
from .base import ChunkFile, DirectLoad
from .cold import ColdTiers
from .io.base import NO_PARENT, Codec, Status
from .noop import NoNvme
from .nvme import NvmeTier


class DirectLoading:
    def __init__(self, cold: ColdTiers) -> None:
        self._cold = cold
        self._open: set[DirectLoad] = set()

    def __len__(self) -> int:
        """Loads prepared and not yet completed."""
        return len(self._open)

    def prepare(self, chain: Chain, start: int, max_chunks: int) -> DirectLoad | None:
        cold = self._cold
        found = cold.run(chain, start)
        if Tier.NVME not in found:
            return None
        first = start + found.index(Tier.NVME)
        keys = chain[first : min(start + len(found), first + max_chunks)]
        files = self._files(keys, is_head=first == 0)
        if not files or not self._refused(chain[: first + len(files)], first):
            return None
        stop = min(first + len(files), start + cold.load_times.take(chain, start, found))
        if stop == first:
            return None
        load = DirectLoad(chain, first, stop, tuple(files[: stop - first]))
        for file in load.files:
            self._nvme.lend(file)
        self._open.add(load)
        return load

    def complete(self, load: DirectLoad, num_chunks: int, status: Status, used: bool) -> None:
        if load.done:
            raise ValueError("complete_direct was called twice for one load")
        for index, file in enumerate(load.files):
            self._nvme.give_back(file, status if index == num_chunks else Status.OK)
        self._settle(load)
        if used:
            self._count(load, load.files[: min(num_chunks, load.stop - load.start)])

    def cut_all(self) -> None:
        """Nothing of what is lent may be served any more."""
        for load in self._open:
            load.stop = load.start

    def close(self) -> None:
        """What is lent is given back, unserved."""
        self.cut_all()
        for load in list(self._open):
            self._settle(load)

    @property
    def _nvme(self) -> NvmeTier:
        assert not isinstance(self._cold.nvme, NoNvme), "nothing is on NVMe"
        return self._cold.nvme

    def _files(self, keys: Sequence[Key], *, is_head: bool) -> list[ChunkFile]:
        """Of the leading chunks that the device can verify, and that DRAM has no slot for."""
        dram = self._cold.dram
        files = map(self._nvme.file, takewhile(lambda key: dram.get(key) is None, keys))
        run = list(takewhile(_is_verifiable, files))
        # A head that hangs from something hangs beside a chunk, and goes with that.
        return [] if is_head and run and run[0].meta.parent != NO_PARENT else run

    def _refused(self, chain: Chain, first: int) -> bool:
        """Whether admission lets none of chain[first:] stay in DRAM."""
        return self._cold.offers.ask(Boundary.NVME_TO_DRAM, chain, first).stop == first

    def _settle(self, load: DirectLoad) -> None:
        load.done = True
        self._open.remove(load)

    def _count(self, load: DirectLoad, served: Sequence[ChunkFile]) -> None:
        """What follows a run that was served whole counts when it is asked for in turn."""
        metrics, stop = self._cold.metrics, load.start + len(served)
        self._nvme.direct_chunks += len(served)
        if served:
            self._cold.touch(load.keys, stop, hits=1)
        metrics.hit_chunks[Tier.NVME] += len(served)
        metrics.hit_tokens[Tier.NVME] += sum(file.meta.num_tokens for file in served)
        if len(served) < len(load.files):
            metrics.missed_chunks += len(load.keys) - stop


def _is_verifiable(file: ChunkFile) -> bool:
    return file.meta.codec is Codec.RAW and file.meta.stored_bytes >= LEAST_BYTES
