"""The cold tiers taken together: what a chain has in either, and who may cross into which."""

from contextlib import ExitStack
from dataclasses import dataclass

from ..admission.base import AdmissionPolicy, Answer, Boundary, Chain, Key, Offer, Tier
from .arena import SharedArena
from .chunk_file import file_bytes
from .dram import DramTier
from .events import EventLog
from .flusher import Flusher
from .history import WhyNot
from .io.base import Codec
from .layout import KVLayout
from .metrics import Metrics
from .noop import NoNvme
from .nvme import NvmeTier


@dataclass(slots=True, eq=False, kw_only=True)
class ColdTiers:
    """What an open store is made of; opening.py builds it."""

    layout: KVLayout
    policy: AdmissionPolicy
    arena: SharedArena
    dram: DramTier
    nvme: NvmeTier | NoNvme
    flusher: Flusher
    why_not: WhyNot
    metrics: Metrics
    events: EventLog
    o_direct: bool
    release: ExitStack

    def run(self, chain: Chain, start: int) -> list[Tier]:
        """For each chunk of the readable run from `start` on, the fastest tier that can serve it.
        A read under way counts as NVMe."""
        keys = chain[start:]
        tiers = [Tier.DRAM] * self.dram.num_readable(keys)
        rest = keys[len(tiers) :]
        on_nvme, dram, nvme = self.nvme.holds, Tier.DRAM, Tier.NVME
        for key, chunk in zip(rest, self.dram.find(rest), strict=True):
            if chunk is not None and chunk.readable:
                tiers.append(dram)
            elif on_nvme(key):
                tiers.append(nvme)
            else:
                break
        return tiers

    def expects(self, key: Key) -> bool:
        """Whether the chunk is in a tier or being written into one."""
        return self.dram.get(key) is not None or self.nvme.expects(key)

    def num_tokens(self, key: Key) -> int:
        """Tokens of a chunk that is here."""
        chunk = self.dram.get(key)
        return self.nvme.describe(key)[0] if chunk is None else chunk.num_tokens

    def touch(self, chain: Chain, stop: int, *, hits: int) -> None:
        self.dram.touch(chain, stop)
        self.nvme.touch(chain, stop, hits=hits)

    def admitted(self, boundary: Boundary, chain: Chain, start: int) -> int:
        """How far the policy lets chain[start:] cross; what it refuses is counted."""
        chunk_bytes, free_chunks = self.layout.chunk_bytes, self.dram.free_slots
        if boundary is Boundary.ONTO_NVME:
            chunk_bytes = file_bytes(chunk_bytes, Codec.RAW)
            free_chunks = self.nvme.free_bytes // chunk_bytes
        write_bytes = (len(chain) - start) * chunk_bytes
        decision = self.policy.decide(Offer(boundary, chain, start, write_bytes, free_chunks))
        stop = max(start, min(decision.stop, len(chain)))
        if decision.answer is not Answer.ADMIT:
            stop = start
        if stop < len(chain):
            self.metrics.refusals[f"{boundary}: {decision.reason}"] += len(chain) - stop
        return stop

    def why_ends(self, chain: Chain, stop: int) -> str:
        """Why chain[stop] cannot be read now; empty at the end of the chain."""
        if stop == len(chain):
            return ""
        if self.expects(chain[stop]):
            return "being written"
        return self.why_not.reason(chain[stop])
