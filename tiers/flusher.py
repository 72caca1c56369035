"""Writes chunks down from DRAM to NVMe, a chain's head before its tail."""

from collections import deque

from ..admission.base import Key
from .dram import ChunkState, DramChunk, DramTier
from .history import WhyNot
from .layout import KVLayout
from .noop import NoNvme
from .nvme import NvmeTier, Planned, WriteDone
from .offers import WORTH_LESS

AT_ONCE = 8
"""Writes planned in one call: what bounds the time on the engine's thread."""


class Flusher:
    """A queue of DIRTY chunks, at most `depth` of them on their way at once."""

    def __init__(
        self,
        dram: DramTier,
        nvme: NvmeTier | NoNvme,
        layout: KVLayout,
        why_not: WhyNot,
        depth: int,
    ) -> None:
        self._dram = dram
        self._nvme = nvme
        self._layout = layout
        self._why_not = why_not
        self._depth = depth
        self._queue: deque[tuple[DramChunk, float | None]] = deque()
        self._writing = 0
        self._blocked = 0  # queued behind a chunk whose store nobody completed yet

    def add(self, chunk: DramChunk, worth: float | None = None) -> None:
        """Take a chunk that NVMe does not have; it is not evicted before it is written or given
        up. With a worth it takes the place only of chunks that are worth less."""
        self._dram.queue(chunk)
        self._queue.append((chunk, worth))

    def takes(self, key: Key) -> bool:
        """Whether a chunk is on NVMe, is on its way there, or may be offered when it is written."""
        return self._nvme.expects(key) or self._is_coming(key)

    @property
    def pending(self) -> int:
        """Chunks whose write is under way or will be, without anybody completing a store first."""
        return len(self._queue) - self._blocked + self._writing

    @property
    def backlog(self) -> int:
        """Chunks that wait for others to be written first."""
        return len(self._queue) - self._blocked

    def run(self) -> None:
        """Plan some of the writes that may be under way; the caller submits them."""
        self._blocked, left = 0, AT_ONCE
        behind_parent: list[tuple[DramChunk, float | None]] = []
        planned = Planned.NO
        while self._queue and left and self._writing < self._depth and planned is not Planned.LATER:
            left -= 1
            chunk, worth = self._queue.popleft()
            if chunk.detached:
                continue
            if self._waits_for_parent(chunk):
                behind_parent.append((chunk, worth))
                continue
            planned = self._plan(chunk, worth)
            if planned is Planned.LATER:
                self._queue.appendleft((chunk, worth))
        if not self._queue and not self._writing:
            self._blocked = len(behind_parent)
        self._queue.extend(behind_parent)

    def apply(self, done: WriteDone) -> None:
        self._writing -= 1
        chunk = self._dram.at(done.slot)
        if not done.ok and not chunk.detached:
            self._why_not.record([chunk.key], "could not be written")
        # What came after it in the same poll may have taken it along: a failed write before it.
        there = done.ok and (chunk.detached or self._nvme.holds(chunk.key))
        self._dram.settle(chunk, ChunkState.CLEAN if there else ChunkState.UNBACKED)

    def give_up(self) -> None:
        """Stop holding chunks in DRAM for writes that cannot be made now."""
        while self._queue:
            chunk, _ = self._queue.popleft()
            if not chunk.detached:
                self._give_up(chunk, "nvme is not available")

    def _is_coming(self, key: Key) -> bool:
        chunk = self._dram.get(key)
        return chunk is not None and chunk.state in (ChunkState.WRITING, ChunkState.DIRTY)

    def _waits_for_parent(self, chunk: DramChunk) -> bool:
        parent = chunk.parent
        return parent is not None and not self._nvme.expects(parent) and self._is_coming(parent)

    def _plan(self, chunk: DramChunk, worth: float | None) -> Planned:
        if chunk.parent is not None and not self._nvme.expects(chunk.parent):
            self._give_up(chunk, "the chunk before it is not on nvme")
            return Planned.NO
        num_bytes = chunk.num_tokens * self._layout.bytes_per_token
        planned = self._nvme.plan_write(chunk, num_bytes, worth)
        if planned is Planned.YES:
            self._dram.flushing(chunk)
            self._writing += 1
        elif planned is Planned.NO:
            self._give_up(chunk, "nvme is full" if worth is None else f"nvme: {WORTH_LESS}")
        return planned

    def _give_up(self, chunk: DramChunk, why: str) -> None:
        self._dram.settle(chunk, ChunkState.UNBACKED)
        self._why_not.record([chunk.key], why)
