"""Chunks that hang beside a chain: KV of other layers (a sliding window, a recurrent state) for the
tokens of one of its chunks. Each goes where its anchor goes; no policy is asked."""

from ..admission.base import Key
from .base import BesideJob
from .cold import ColdTiers
from .dram import ChunkState, DramChunk
from .storing import DRAM_IS_FULL, only_in_dram, settle

NO_ANCHOR = "the chunk it hangs from is not here"


class Beside:
    """In every order a chunk beside is a child of its anchor: evicted before it, lost with it."""

    def __init__(self, cold: ColdTiers) -> None:
        self._cold = cold

    def prepare(self, anchors: tuple[Key, ...], keys: tuple[Key, ...]) -> BesideJob:
        cold = self._cold
        stay = only_in_dram(cold, anchors + keys)  # leaves until something hangs from them
        cold.dram.pin(*stay)
        with cold.nvme.kept(anchors):
            chunks = self._reserve(job := BesideJob(keys=keys, anchors=anchors))
        cold.dram.unpin(*stay)
        job.wanted, job.chunks = tuple(chunks), tuple(chunks.values())
        # A chain's end is always older than its head, and a chunk beside than its anchor.
        order = [key for pair in zip(anchors, keys, strict=True) for key in pair]
        cold.touch(order, len(order), hits=0)
        return job

    def complete(self, job: BesideJob, success: bool) -> None:
        cold = self._cold
        settle(cold, job, success)
        if cold.write_down == "eager":
            self._write_down(job)
        elif cold.write_down == "late":
            cold.cleaner.begin()
        cold.nvme.submit()

    def _write_down(self, job: BesideJob) -> None:
        cold = self._cold
        for anchor, chunk in zip(job.anchors, cold.dram.find(job.keys), strict=True):
            unbacked = chunk is not None and chunk.state is ChunkState.UNBACKED
            if chunk is not None and unbacked and cold.flusher.takes(anchor):
                cold.flusher.add(chunk)
        cold.flusher.run()

    def _reserve(self, job: BesideJob) -> dict[int, DramChunk]:
        """Slots for the keys that are not here, by index; says in the job why some have none."""
        cold, chunks = self._cold, dict[int, DramChunk]()
        for index, (anchor, key) in enumerate(zip(job.anchors, job.keys, strict=True)):
            if cold.expects(key):
                continue
            chunk, why_not = None, NO_ANCHOR
            if cold.expects(anchor):
                chunk = cold.reserve(key, anchor, cold.layout.chunk_tokens, ChunkState.WRITING)
                why_not = DRAM_IS_FULL
            if chunk is not None:
                chunk.beside = True
                chunks[index] = chunk
            else:
                job.why_not = why_not
                cold.why_not.record([key], why_not)
        return chunks
