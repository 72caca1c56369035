"""Writes DRAM down late: decides what would be evicted next, a little ahead of eviction.

A slot is ready when it is free, or when the chunk in it is on NVMe, on its way there, or was
refused by admission (worthless: evicting it forgets it). The cleaner keeps one slot in CLEAN_SHARE
ready, and decides more when one is needed at once. It takes the next candidate of DRAM's eviction
order, and offers NVMe that chunk behind all it hangs from that is only in DRAM: what is admitted of
them is written together, head first, and the rest is worthless until it is used again.
"""

from collections.abc import Sequence
from itertools import zip_longest

from ..admission.base import Key
from .dram import ChunkState, DramChunk, DramTier
from .flusher import Flusher
from .history import WhyNot
from .noop import NoNvme
from .nvme import NvmeTier
from .offers import Offers

CLEAN_SHARE = 16
AT_ONCE = 32
"""Decisions per call: what bounds the time on the engine's thread."""

ON_DEMAND = 32
"""Decisions between two polls for slots that are needed at once."""


class Cleaner:
    """A pass begins when a store is completed, and goes on at every poll until enough is ready.

    Nothing is UNDECIDED unless the store writes late; then there is nothing to do here.
    """

    def __init__(
        self,
        dram: DramTier,
        nvme: NvmeTier | NoNvme,
        flusher: Flusher,
        offers: Offers,
        why_not: WhyNot,
        num_slots: int,
    ) -> None:
        self._dram = dram
        self._nvme = nvme
        self._flusher = flusher
        self._offers = offers
        self._why_not = why_not
        self._target = max(1, num_slots // CLEAN_SHARE)
        self._on_demand = ON_DEMAND
        self._passed: set[Key] = set()  # by this pass: decided, or behind what an engine fills
        self.due = False
        """Whether a pass has begun and not ended."""

    def begin(self) -> None:
        """A store was completed: slots may be short from now on. What is written may take the
        place on NVMe of something in DRAM, so nothing is decided twice before the next begins."""
        self.due = True
        self._passed.clear()
        self._go_on()

    def poll(self) -> None:
        self._on_demand = ON_DEMAND
        if self.due:
            self._go_on()

    def decide_one(self) -> bool:
        """A slot is needed and none can be had: decide the next candidate, which may turn out to
        be worthless. False when there is none, or time is up."""
        self._on_demand -= 1
        return self._on_demand >= 0 and self._decide_next(set())

    def decide_all(self, passed: set[Key]) -> bool:
        """Whether all that can be decided is, once; to be called again after a poll until then,
        with the same set, at first empty."""
        if self._dram.num_undecided and not self._nvme.io_alive:
            return False
        while not self._flusher.backlog and self._decide_next(passed):
            pass
        if not self._flusher.backlog:
            self._decide_inner(passed)
        return not self._flusher.backlog

    def _go_on(self) -> None:
        """Decide until enough is ready, as far as one call may go; the caller submits."""
        left = AT_ONCE
        while self.due and left and not self._flusher.backlog:
            short = self._dram.ready_slots < self._target and self._nvme.io_alive
            self.due = short and self._decide_next(self._passed)
            left -= 1

    def _decide_next(self, passed: set[Key]) -> bool:
        """Decide one candidate that is not in `passed`, and add it; False when there is none."""
        while (chunk := self._dram.candidate(passed)) is not None:
            if self._decide_once(chunk, passed):
                return True
        return False

    def _decide_inner(self, passed: set[Key]) -> None:
        """Decide what is no candidate either: a reader has it, or something worthless hangs from
        it, before which it is not evicted."""
        for chunk in self._dram.undecided():
            if self._flusher.backlog:
                break
            if chunk.key not in passed and chunk.state is ChunkState.UNDECIDED:
                self._decide_once(chunk, passed)

    def _decide_once(self, chunk: DramChunk, passed: set[Key]) -> bool:
        """Whether it could be decided: it is not behind a chunk that an engine still fills."""
        path = self._path(chunk)
        passed.add(chunk.key)
        if path[0].state is ChunkState.WRITING:
            return False
        self._decide(chunk, path)
        passed.update(c.key for c in path if c.state is not ChunkState.UNDECIDED)
        return True

    def _path(self, chunk: DramChunk) -> list[DramChunk]:
        """The chunk behind all it hangs from that is in DRAM and neither on NVMe nor on its way
        there, head first; from the last one on that an engine still fills."""
        path = [chunk]
        expects, get = self._nvme.expects, self._dram.get
        while (key := chunk.parent) is not None and not expects(key):
            above = get(key)
            assert above is not None, "a chunk hangs from nothing"
            if above.state is ChunkState.DIRTY:
                break
            path.append(chunk := above)
            if chunk.state is ChunkState.WRITING:
                break
        path.reverse()
        return path

    def _decide(self, chunk: DramChunk, path: list[DramChunk]) -> None:
        """What hangs beside a chunk goes where that one goes; no policy is asked for it."""
        hanging = [path.pop()] if chunk.beside else []
        if not self._nvme.io_alive:  # DRAM goes on alone
            self._refuse(chunk, "nvme is not available")
        elif not path:
            self._write(hanging)
        elif hanging and path[-1].state is ChunkState.UNBACKED:
            self._refuse(chunk, "the chunk it hangs from is not on nvme")
        else:
            self._offer(path, hanging)

    def _offer(self, path: list[DramChunk], hanging: list[DramChunk]) -> None:
        made = self._offers.ask_path([above.key for above in path])
        if made.stop == len(path):
            self._write(path + hanging, made.worth)
            return
        for chunk in path[made.stop :] + hanging:
            self._refuse(chunk, made.why)
        self._write(path[: made.stop], made.worth)

    def _write(self, path: list[DramChunk], worth: Sequence[float] = ()) -> None:
        for chunk, value in zip_longest(path, worth):
            self._flusher.add(chunk, value)
        self._flusher.run()

    def _refuse(self, chunk: DramChunk, why: str) -> None:
        """It stays until it is evicted, or used and decided again."""
        self._dram.settle(chunk, ChunkState.UNBACKED)
        self._why_not.refused([chunk.key], why)
