"""Write-down: slots for new chunks as far as admission lets the chain in, then NVMe, head first."""

from ..admission.base import Boundary, Chain, Key
from .base import ChainJob, StoreJob
from .cold import ColdTiers
from .dram import ChunkState, DramChunk

DRAM_IS_FULL = "dram is full"


class Storing:
    def __init__(self, cold: ColdTiers) -> None:
        self._cold = cold

    def prepare(self, chain: Chain, start: int, tail_tokens: int) -> ChainJob:
        cold = self._cold
        held = next((i for i, key in enumerate(chain) if not cold.expects(key)), len(chain))
        job = ChainJob(keys=chain, start=start, stop=held)
        if held < start:
            job.why_not = f"chunk {held} of the chain is not here"
        elif held < len(chain):
            self._reserve(job, cold.admitted(Boundary.INTO_DRAM, chain, held), tail_tokens)
        cold.touch(chain, job.stop, hits=0)  # new chunks too: a tail is always older than its head
        return job

    def complete(self, job: ChainJob, success: bool) -> None:
        settle(self._cold, job, success)
        self._write_down(job.keys[: job.stop])

    def _reserve(self, job: ChainJob, stop: int, tail_tokens: int) -> None:
        """Slots for chain[job.stop:stop], as far as there are any."""
        cold, chain, held = self._cold, job.keys, job.stop
        above = only_in_dram(cold, chain[held - 1 : held])
        cold.dram.pin(*above)  # a leaf until the first is reserved
        chunks: list[DramChunk] = []
        parent = chain[held - 1] if held else None
        sizes = [cold.layout.chunk_tokens] * (len(chain) - 1 - held) + [tail_tokens]
        for key, num_tokens in zip(chain[held:stop], sizes, strict=False):
            chunk = reserve(cold, key, parent, num_tokens)
            if chunk is None:
                break
            chunks.append(chunk)
            parent = key
        cold.dram.unpin(*above)
        job.stop = held + len(chunks)
        job.wanted, job.chunks = tuple(range(held, job.stop)), tuple(chunks)
        if job.stop < len(chain):
            job.why_not = DRAM_IS_FULL if job.stop < stop else "refused by admission"
        for key in chain[job.stop :]:
            cold.why_not.record(key, job.why_not)

    def _write_down(self, chain: Chain) -> None:
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


def only_in_dram(cold: ColdTiers, keys: Chain) -> list[DramChunk]:
    """Those that must not be evicted while slots are reserved for chunks that hang from them."""
    found = filter(None, cold.dram.find(keys))
    return [chunk for chunk in found if chunk.state is not ChunkState.CLEAN]


def reserve(cold: ColdTiers, key: Key, parent: Key | None, num_tokens: int) -> DramChunk | None:
    """A slot that an engine is about to fill; None when DRAM is full of what must stay."""
    chunk = cold.dram.reserve(key, parent, num_tokens, ChunkState.WRITING)
    if chunk is None and not cold.nvme.io_alive:
        cold.flusher.give_up()  # DRAM goes on alone
        chunk = cold.dram.reserve(key, parent, num_tokens, ChunkState.WRITING)
    return chunk


def settle(cold: ColdTiers, job: StoreJob, success: bool) -> None:
    """The job's slots are readable from now on or, without success, forgotten with all below."""
    job.done = True
    for chunk in job.chunks:
        if success:
            cold.metrics.admitted_chunks += not chunk.detached
        else:
            cold.metrics.dropped_stores += 1
            cold.dram.detach(chunk)
            cold.dram.detach_below(chunk.key)
        cold.dram.settle(chunk, ChunkState.UNBACKED)
