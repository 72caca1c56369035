"""What a store does with one request, without bytes, files or threads: any policy, its own objects,
every decision in the order in which `rootcellar.tiers` takes them.

    observe -> load: pin what DRAM has, stage what only NVMe has -> keep some of that in DRAM
            -> store: slots for what is in neither -> write down, at once or by the cleaner

All writes of a request are done when it ends, together.
"""

from collections import Counter
from dataclasses import dataclass

from ...admission.base import AdmissionPolicy, Boundary, Chain, Tier
from ...tiers.base import WriteDown
from ...tiers.offers import WORTH_LESS
from .cold_model import ColdModel
from .questions import Questions, worth_of
from .tier_model import TierModel


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one request found: chunks of its leading run by the tier that served them, and chunks
    of it that were anywhere in either tier (`plain`, never fewer than the run)."""

    dram: int
    nvme: int
    plain: int


class Replay:
    """A store of two tiers, or of one when nvme_chunks is 0. A chain holds no key twice.

    chunk_bytes: what the policy is told that writing one chunk costs.
    """

    def __init__(
        self,
        policy: AdmissionPolicy,
        dram_chunks: int,
        nvme_chunks: int = 0,
        *,
        write_down: WriteDown = "late",
        chunk_bytes: int = 1,
    ) -> None:
        policy.open({Tier.DRAM: dram_chunks} | ({Tier.NVME: nvme_chunks} if nvme_chunks else {}))
        self.chunk_writes = 0
        """Chunks that a store admitted to DRAM."""
        self.promotions = 0
        self._policy = policy
        self._questions = Questions(policy, chunk_bytes)
        self._cold = ColdModel(policy, self._questions, dram_chunks, nvme_chunks, write_down)

    @property
    def dram(self) -> TierModel:
        return self._cold.dram

    @property
    def nvme(self) -> TierModel:
        return self._cold.nvme

    @property
    def nvme_chunk_writes(self) -> int:
        return self._cold.num_written

    @property
    def wasted_promotions(self) -> int:
        """Chunks that left DRAM before they served anybody there."""
        return self._cold.num_wasted

    @property
    def refusals(self) -> Counter[str]:
        """Chunks by boundary and reason."""
        return self._questions.refusals

    def request(self, chain: Chain, now_s: float) -> Outcome:
        """One request, from its arrival to the end of all that it causes."""
        self._policy.observe(chain, now_s)
        plain = self._num_resident(chain)
        dram, nvme = self._load_all(chain)
        self._store(chain)
        self._cold.finish_writes()
        return Outcome(dram, nvme, plain)

    def _num_resident(self, chain: Chain) -> int:
        cold = self._cold
        elsewhere = (key for key in chain if key not in cold.dram) if len(cold.nvme) else ()
        return cold.dram.num_of(chain) + cold.nvme.num_of(elsewhere)

    # Load ------------------------------------------------------------------------------------

    def _load_all(self, chain: Chain) -> tuple[int, int]:
        """Serve the leading run, in as many loads as it takes for want of slots; (chunks that DRAM
        served, chunks that had to come from NVMe)."""
        dram = nvme = start = 0
        while True:
            stop, num_staged, ends = self._load(chain, start)
            dram += stop - start - num_staged
            nvme += num_staged
            if ends or stop == start:
                return dram, nvme
            start = stop

    def _load(self, chain: Chain, start: int) -> tuple[int, int, bool]:
        """Serve what there are slots for of the run from `start` on; (where that ends, chunks that
        were staged, whether the run ends there, too)."""
        cold = self._cold
        held = stop = cold.num_held(chain)
        in_dram = start + cold.dram.num_leading(chain[start:])
        if in_dram < held:
            stop = self._stage(chain, start, in_dram, held)
        cold.touch(chain, stop)
        cold.promoted.difference_update(chain[start:stop])
        num_staged = len(cold.staged)
        if num_staged:
            self._promote(chain, stop)
        return stop, num_staged, stop == held

    def _stage(self, chain: Chain, start: int, first: int, stop: int) -> int:
        """Slots for what of chain[first:stop] only NVMe has; where the run ends for want of one."""
        cold = self._cold
        cold.begin()
        cold.pinned.update(key for key in chain[start:stop] if key in cold.dram)
        cold.reading.update(key for key in chain[first:stop] if key not in cold.dram)
        index = first
        while index < stop:
            key = chain[index]
            if key in cold.dram:
                index += 1
            elif cold.take_slot():
                cold.staged.append(key)
                index += 1
            else:  # the run's last chunk is given up for this one, or it ends here
                stop -= 1
                cold.pinned.discard(chain[stop])
        cold.pinned.clear()
        cold.reading.intersection_update(cold.staged)
        return stop

    def _promote(self, chain: Chain, stop: int) -> None:
        """What admission lets stay of the staged chunks; the slots of the others are free again."""
        cold = self._cold
        first = chain.index(cold.staged[0])
        decision = self._questions.ask(Boundary.NVME_TO_DRAM, chain[:stop], first, cold.free_slots)
        cold.staged.clear()
        for index in range(first, decision.stop):
            if chain[index] in cold.reading:
                cold.enter_dram(chain, index)
                cold.promoted.add(chain[index])
                self.promotions += 1
        cold.reading.clear()

    # Store -----------------------------------------------------------------------------------

    def _store(self, chain: Chain) -> None:
        """What is in neither tier enters DRAM, as far as admission and room go."""
        cold = self._cold
        stop = cold.num_held(chain)
        if stop < len(chain):
            stop = self._admit(chain, stop)
        cold.touch(chain, stop)
        if cold.eager:
            cold.write_chain(chain[:stop])

    def _admit(self, chain: Chain, held: int) -> int:
        """Slots for chunks from chain[held] on; how far they go."""
        cold, stop = self._cold, held
        decision = self._questions.ask(Boundary.INTO_DRAM, chain, held, cold.free_slots)
        above = chain[held - 1 : held]  # a leaf until the first new chunk hangs from it
        cold.pinned.update(k for k in above if k in cold.dram and k not in cold.nvme)
        cold.kept.update(above)
        cold.begin()
        while stop < decision.stop and cold.take_slot(worth_of(decision, stop - held)):
            cold.enter_dram(chain, stop)
            cold.pinned.add(chain[stop])  # an engine fills it
            stop += 1
        cold.pinned.difference_update(above)
        cold.kept.clear()
        if stop < decision.stop and decision.worth and cold.may_evict:
            self._questions.refuse(Boundary.INTO_DRAM, WORTH_LESS, decision.stop - stop)
        cold.pinned.clear()
        self.chunk_writes += stop - held
        return stop

    def check_integrity(self) -> None:
        """Raise AssertionError if any invariant is broken; between requests."""
        self._cold.check_integrity()
