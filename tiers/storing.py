"""Write-down: slots for new chunks as far as admission lets the chain in, then NVMe, head first."""

from ..admission.base import Boundary, Key
from .base import StoreJob
from .cold import ColdTiers
from .dram import ChunkState, DramChunk

DRAM_IS_FULL = "dram is full"


class Storing:
    def __init__(self, cold: ColdTiers) -> None:
        self._cold = cold

    def prepare(self, chain: list[Key], start: int, tail_tokens: int) -> StoreJob:
        cold = self._cold
        held = next((i for i, key in enumerate(chain) if not cold.expects(key)), len(chain))
        cold.touch(chain, held, hits=0)
        if held < start:
            return StoreJob(chain, start, held, (), (), f"chunk {held} of the chain is not here")
        if held == len(chain):
            return StoreJob(chain, start, held, (), ())
        stop = cold.admitted(Boundary.INTO_DRAM, chain, held)
        why_not = "refused by admission" if stop < len(chain) else ""
        chunks = self._reserve(chain, held, stop, tail_tokens)
        if held + len(chunks) < stop:
            stop, why_not = held + len(chunks), DRAM_IS_FULL
        for key in chain[stop:]:
            cold.why_not.record(key, why_not)
        return StoreJob(chain, start, stop, tuple(range(held, stop)), tuple(chunks), why_not)

    def complete(self, job: StoreJob, success: bool) -> None:
        dram, metrics = self._cold.dram, self._cold.metrics
        job.done = True
        for chunk in job.chunks:
            if success:
                metrics.admitted_chunks += not chunk.detached
            else:
                metrics.dropped_stores += 1
                dram.detach(chunk)
                dram.detach_below(chunk.key)
            dram.settle(chunk, ChunkState.UNBACKED)
        self._write_down(job.keys[: job.stop])

    def _reserve(self, chain: list[Key], start: int, stop: int, tail: int) -> list[DramChunk]:
        dram = self._cold.dram
        above = dram.get(chain[start - 1]) if start else None
        if above is not None and above.state is ChunkState.CLEAN:
            above = None  # on NVMe too
        if above is not None:
            dram.pin(above)  # a leaf until the first is reserved: it must not be evicted for it
        chunks: list[DramChunk] = []
        for index in range(start, stop):
            num_tokens = tail if index == len(chain) - 1 else self._cold.layout.chunk_tokens
            parent = chain[index - 1] if index else None
            chunk = self._slot(chain[index], parent, num_tokens)
            if chunk is None:
                break
            chunks.append(chunk)
        if above is not None:
            dram.unpin(above)
        return chunks

    def _slot(self, key: Key, parent: Key | None, num_tokens: int) -> DramChunk | None:
        dram = self._cold.dram
        chunk = dram.reserve(key, parent, num_tokens, ChunkState.WRITING)
        if chunk is None and not self._cold.nvme.io_alive:
            self._cold.flusher.give_up()  # DRAM goes on alone
            chunk = dram.reserve(key, parent, num_tokens, ChunkState.WRITING)
        return chunk

    def _write_down(self, chain: list[Key]) -> None:
        """Offer what of the chain is only in DRAM to NVMe."""
        cold = self._cold
        if not cold.nvme.present:
            return
        backed = next((i for i, key in enumerate(chain) if not cold.nvme.expects(key)), len(chain))
        if backed == len(chain):
            return
        for key in chain[backed : cold.admitted(Boundary.ONTO_NVME, chain, backed)]:
            chunk = cold.dram.get(key)
            if chunk is not None and chunk.state is ChunkState.UNBACKED:
                cold.flusher.add(chunk)
        cold.flusher.run()
        cold.nvme.submit()
