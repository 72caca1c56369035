"""Writes admitted chunks down from DRAM to NVMe, a chain's head before its tail."""

from collections import deque

from .dram import ChunkState, DramChunk, DramTier
from .history import WhyNot
from .layout import KVLayout
from .noop import NoNvme
from .nvme import NvmeTier, Planned, WriteDone


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
        self._queue: deque[DramChunk] = deque()
        self._writing = 0

    def add(self, chunk: DramChunk) -> None:
        """Take an UNBACKED chunk; it is not evicted before it is written or given up."""
        assert chunk.state is ChunkState.UNBACKED
        chunk.state = ChunkState.DIRTY
        self._queue.append(chunk)

    @property
    def pending(self) -> int:
        return len(self._queue) + self._writing

    def run(self) -> None:
        """Plan as many writes as may be under way; the caller submits them."""
        for _ in range(len(self._queue)):
            if self._writing >= self._depth:
                return
            chunk = self._queue.popleft()
            if chunk.detached:
                continue
            planned = self._plan(chunk)
            if planned is Planned.LATER:
                self._queue.appendleft(chunk)
                return
            if planned is Planned.NO:
                self._give_up(chunk, "nvme is full")

    def apply(self, done: WriteDone) -> None:
        self._writing -= 1
        chunk = self._dram.at(done.slot)
        if not done.ok and not chunk.detached:
            self._why_not.record(chunk.key, "could not be written")
        self._dram.settle(chunk, ChunkState.CLEAN if done.ok else ChunkState.UNBACKED)

    def give_up(self) -> None:
        """Stop holding chunks in DRAM for writes that cannot be made now."""
        while self._queue:
            chunk = self._queue.popleft()
            if not chunk.detached:
                self._give_up(chunk, "nvme is not available")

    def _plan(self, chunk: DramChunk) -> Planned:
        parent = chunk.parent
        if parent is not None and not self._nvme.expects(parent):
            above = self._dram.get(parent)
            if above is not None and above.state in (ChunkState.WRITING, ChunkState.DIRTY):
                self._queue.append(chunk)  # behind its parent, which is still to come
            else:
                self._give_up(chunk, "the chunk before it is not on nvme")
            return Planned.YES
        planned = self._nvme.plan_write(chunk, chunk.num_tokens * self._layout.bytes_per_token)
        if planned is Planned.YES:
            chunk.state = ChunkState.FLUSHING
            self._writing += 1
        return planned

    def _give_up(self, chunk: DramChunk, why: str) -> None:
        chunk.state = ChunkState.UNBACKED
        self._why_not.record(chunk.key, why)
