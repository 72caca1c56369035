"""Write-down: slots for new chunks as far as admission lets the chain in, then NVMe, head first."""

from itertools import repeat

from ..admission.base import Boundary, Chain
from .base import ChainJob, StoreJob
from .cold import ColdTiers
from .dram import ChunkState, DramChunk
from .offers import WORTH_LESS, Admitted

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
            self._reserve(job, cold.offers.ask(Boundary.INTO_DRAM, chain, held), tail_tokens)
        cold.touch(chain, job.stop, hits=0)  # new chunks too: a tail is always older than its head
        return job

    def complete(self, job: ChainJob, success: bool) -> None:
        settle(self._cold, job, success)
        if self._cold.write_down == "eager":
            self._write_down(job.keys[: job.stop])
        elif self._cold.write_down == "late":
            self._cold.cleaner.begin()
        self._cold.nvme.submit()

    def _reserve(self, job: ChainJob, admitted: Admitted, tail_tokens: int) -> None:
        """Slots for what of the chain was admitted, as far as there are any."""
        cold, chain, held = self._cold, job.keys, job.stop
        above = only_in_dram(cold, chain[held - 1 : held])
        cold.dram.pin(*above)  # a leaf until the first is reserved
        chunks: list[DramChunk] = []
        parent = chain[held - 1] if held else None
        sizes = [cold.layout.chunk_tokens] * (len(chain) - 1 - held) + [tail_tokens]
        worth = admitted.worth or repeat(None)
        wanted = zip(chain[held : admitted.stop], sizes, worth, strict=False)
        with cold.nvme.kept(chain[held - 1 : held]):
            for key, num_tokens, value in wanted:
                chunk = cold.reserve(key, parent, num_tokens, ChunkState.WRITING, value)
                if chunk is None:
                    break
                chunks.append(chunk)
                parent = key
        cold.dram.unpin(*above)
        job.stop = held + len(chunks)
        job.wanted, job.chunks = tuple(range(held, job.stop)), tuple(chunks)
        if job.stop < len(chain):
            self._explain(job, admitted)

    def _explain(self, job: ChainJob, admitted: Admitted) -> None:
        """Why chain[job.stop:] is not wanted."""
        cold, chain = self._cold, job.keys
        left = chain[job.stop :]
        if job.stop == admitted.stop:
            job.why_not = cold.why_not.refused(left, admitted.why)
        elif admitted.worth and cold.dram.num_evictable > cold.dram.num_pinned:
            # Something could go, and is worth as much: waiting for room would be in vain.
            cold.metrics.refuse(Boundary.INTO_DRAM, WORTH_LESS, admitted.stop - job.stop)
            job.why_not = cold.why_not.refused(left, WORTH_LESS)
        else:
            job.why_not = DRAM_IS_FULL
            cold.why_not.record(left, DRAM_IS_FULL)

    def _write_down(self, chain: Chain) -> None:
        """Offer what of the chain is only in DRAM to NVMe."""
        cold = self._cold
        backed = next((i for i, key in enumerate(chain) if not cold.nvme.expects(key)), len(chain))
        if backed == len(chain):
            return
        admitted = cold.offers.ask(Boundary.ONTO_NVME, chain, backed)
        worth = admitted.worth or repeat(None)
        for key, value in zip(chain[backed : admitted.stop], worth, strict=False):
            chunk = cold.dram.get(key)
            if chunk is not None and chunk.state is ChunkState.UNBACKED:
                cold.flusher.add(chunk, value)
        cold.flusher.run()


def only_in_dram(cold: ColdTiers, keys: Chain) -> list[DramChunk]:
    """Those that must not be evicted while slots are reserved for chunks that hang from them."""
    found = filter(None, cold.dram.find(keys))
    return [chunk for chunk in found if chunk.state is not ChunkState.CLEAN]


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
        cold.dram.settle(chunk, cold.dram.unwritten)
