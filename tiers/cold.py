"""The cold tiers taken together: what a chain has in either, and room for more of it."""

from contextlib import ExitStack
from dataclasses import dataclass

from ..admission.base import AdmissionPolicy, Chain, Key, Tier
from .arena import SharedArena
from .base import WriteDown
from .cleaner import Cleaner
from .dram import ChunkState, DramChunk, DramTier
from .events import EventLog
from .flusher import Flusher
from .history import WhyNot
from .layout import KVLayout
from .learning import Learning
from .load_times import LoadTimes
from .metrics import Metrics
from .noop import NoNvme
from .nvme import NvmeTier
from .offers import Offers


@dataclass(slots=True, eq=False, kw_only=True)
class ColdTiers:
    """What an open store is made of; opening.py builds it.

    write_down: None without NVMe.
    """

    layout: KVLayout
    policy: AdmissionPolicy
    arena: SharedArena
    dram: DramTier
    nvme: NvmeTier | NoNvme
    write_down: WriteDown | None
    offers: Offers
    learning: Learning
    load_times: LoadTimes
    flusher: Flusher
    cleaner: Cleaner
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

    def reserve(
        self,
        key: Key,
        parent: Key | None,
        num_tokens: int,
        state: ChunkState,
        worth: float | None = None,
    ) -> DramChunk | None:
        """A slot in DRAM; None when it is full of what must stay or, with a worth, of what is worth
        as much. Never waits for a write: what is to be written first is no room."""
        chunk = self.dram.reserve(key, parent, num_tokens, state, worth)
        while chunk is None and self.cleaner.decide_one():
            chunk = self.dram.reserve(key, parent, num_tokens, state, worth)
        if chunk is None and not self.nvme.io_alive:
            self.flusher.give_up()  # DRAM goes on alone
            chunk = self.dram.reserve(key, parent, num_tokens, state, worth)
        return chunk

    def why_ends(self, chain: Chain, stop: int) -> str:
        """Why chain[stop] cannot be read now; empty at the end of the chain."""
        if stop == len(chain):
            return ""
        if self.expects(chain[stop]):
            return "being written"
        return self.why_not.reason(chain[stop])
