"""The two tiers of a replay: who makes room for whom, and what is written down when."""

from collections.abc import Sequence

from ...admission.base import AdmissionPolicy, Boundary, Chain, Decision, Key, Tier
from ...tiers.base import WriteDown
from ...tiers.cleaner import CLEAN_SHARE, ON_DEMAND
from .questions import Questions, worth_of
from .tier_model import TierModel


class ColdModel:
    """DRAM above NVMe, which holds nothing when its capacity is 0.

    The fields are the replay's: it pins, reads, and says when writes are done.
    """

    def __init__(
        self,
        policy: AdmissionPolicy,
        questions: Questions,
        dram_chunks: int,
        nvme_chunks: int,
        write_down: WriteDown,
    ) -> None:
        self.dram = TierModel(dram_chunks, policy.order(Tier.DRAM))
        self.nvme = TierModel(nvme_chunks, policy.order(Tier.NVME))
        self.late = write_down == "late" and nvme_chunks > 0
        self.eager = write_down == "eager" and nvme_chunks > 0
        self.num_written = 0
        """Chunks written to NVMe."""
        self.num_wasted = 0
        """Chunks promoted to DRAM that left it before they served anybody there."""
        self.pinned: set[Key] = set()
        """In DRAM, and must stay there."""
        self.staged: list[Key] = []
        """Read from NVMe into slots of DRAM, in no order there; must stay on NVMe."""
        self.reading: set[Key] = set()
        """Is to be staged: must stay on NVMe."""
        self.kept: set[Key] = set()
        """Something is about to hang from it: must stay on NVMe."""
        self.promoted: set[Key] = set()
        """In DRAM, came from NVMe, and served nobody since."""
        self._questions = questions
        self._target = max(1, dram_chunks // CLEAN_SHARE)
        self._left = 0  # decisions on demand
        # Of what is in DRAM: on NVMe or on its way; of these, on its way; to be written, with its
        # worth; refused by NVMe and not used since. The rest is undecided.
        self._backed: set[Key] = set()
        self._writing: set[Key] = set()
        self._queue: dict[Key, float | None] = {}
        self._worthless: set[Key] = set()
        self._leaving: set[Key] = set()  # NVMe, as writes that are under way take their place

    def num_held(self, chain: Chain) -> int:
        """How many leading chunks are in one tier or the other."""
        held = self.dram.num_leading(chain)
        while held < len(chain) and (chain[held] in self.dram or chain[held] in self.nvme):
            held += 1
        return held

    def touch(self, chain: Chain, stop: int) -> None:
        """A request used chain[:stop]: what NVMe refused of it is undecided again."""
        self.dram.order.touch(chain, stop)
        self.nvme.order.touch(chain, stop)
        self._worthless.difference_update(chain[:stop])

    # Room in DRAM ----------------------------------------------------------------------------

    @property
    def free_slots(self) -> int:
        return self.dram.free - len(self.staged)

    def begin(self) -> None:
        """A load or a store begins to take slots."""
        self._left = ON_DEMAND

    def take_slot(self, worth: float | None = None) -> bool:
        """Whether DRAM has a slot to give, after evicting if need be. Never waits for a write."""
        return self.free_slots > 0 or self._evict_from_dram(worth)

    def _evict_from_dram(self, worth: float | None) -> bool:
        key = self.dram.order.victim(self._must_stay, worth)
        while key is None and self._decide_on_demand():
            key = self.dram.order.victim(self._must_stay, worth)
        if key is None:
            return False
        self.dram.remove(key)
        self._backed.discard(key)
        self._worthless.discard(key)
        self.num_wasted += key in self.promoted
        self.promoted.discard(key)
        return True

    def enter_dram(self, chain: Chain, index: int) -> None:
        """chain[index] gets a slot that is free."""
        key = chain[index]
        self.dram.add(key, chain[index - 1] if index else None)
        if key in self.nvme:
            self._backed.add(key)

    @property
    def may_evict(self) -> bool:
        """Whether something in DRAM could go, for what is worth enough."""
        if self.late:
            return bool(self._worthless) or not self._backed <= self._writing
        return len(self.dram) > len(self.pinned)

    def _decide_on_demand(self) -> bool:
        self._left -= 1
        return self.late and self._left >= 0 and self._decide_next()

    def _must_stay(self, key: Key) -> bool:
        """It is in use, or its write to NVMe is to be decided, or under way."""
        if not self.late or key in self._worthless:
            return key in self.pinned
        return key in self.pinned or key not in self._backed or key in self._writing

    # Write down ------------------------------------------------------------------------------

    def write_chain(self, chain: Chain) -> None:
        """Eager: all of the chain that admission lets onto NVMe, now."""
        start = self.nvme.num_leading(chain)
        if start < len(chain):
            decision = self._questions.ask(Boundary.ONTO_NVME, chain, start, self.nvme.free)
            self._write(chain[start : decision.stop], decision)

    def finish_writes(self) -> None:
        """All writes end, those that the cleaner still begins, too; then those that waited."""
        due = self.late
        while True:
            while due and not self._queue:
                due = self._num_ready < self._target and self._decide_next()
            self._writing.clear()
            self._leaving.clear()
            if not self._queue:
                return
            self._go_on()

    def _go_on(self) -> None:
        """Begin the writes that are due, head first. A chunk that NVMe has no room for is refused,
        and all that hangs from it; one whose file is being removed waits for that."""
        while self._queue:
            key, worth = next(iter(self._queue.items()))
            if key in self._leaving:
                return
            parent = self.dram.parent(key)
            if (parent is None or parent in self.nvme) and self._enter_nvme(key, parent, worth):
                self._writing.add(key)
                self._backed.add(key)
                self.num_written += 1
            elif self.late:
                self._worthless.add(key)
            del self._queue[key]

    def _decide_next(self) -> bool:
        """The cleaner decides on what DRAM would evict next, behind all it hangs from: what is
        admitted is written, the rest is worthless. False when nothing is undecided."""
        key = self.dram.order.victim(self._is_decided)
        if key is None:
            return False
        path = self._path(key)
        decision = self._questions.ask_path(path, self.nvme.free)
        self._worthless.update(path[decision.stop :])
        self._write(path[: decision.stop], decision)
        return True

    def _is_decided(self, key: Key) -> bool:
        """Or in use."""
        if key in self._backed or key in self._worthless:
            return True
        return key in self._queue or key in self.pinned

    def _path(self, key: Key) -> list[Key]:
        """The chunk behind all it hangs from that is neither on NVMe nor on its way there."""
        path = [key]
        parent = self.dram.parent(key)
        while parent is not None and parent not in self.nvme and parent not in self._queue:
            path.append(parent)
            parent = self.dram.parent(parent)
        return path[::-1]

    def _write(self, keys: Sequence[Key], decision: Decision) -> None:
        self._worthless.difference_update(keys)
        self._queue.update((key, worth_of(decision, index)) for index, key in enumerate(keys))
        self._go_on()

    def _enter_nvme(self, key: Key, parent: Key | None, worth: float | None) -> bool:
        """Whether NVMe has room for it, after evicting if need be."""
        self.nvme.add(key, parent)  # so that what it hangs from is no leaf
        if self.nvme.free >= 0:
            return True
        victim = self.nvme.order.victim(lambda k: k == key or self._must_stay_on_nvme(k), worth)
        if victim is None:
            self.nvme.remove(key)
            return False
        self.nvme.remove(victim)
        if victim in self._backed:  # it was worth least there a moment ago
            self._backed.discard(victim)
            self._worthless.add(victim)
        self._leaving.add(victim)
        return True

    def _must_stay_on_nvme(self, key: Key) -> bool:
        """It is being written or read, or chunks in DRAM hang from it while it is not there."""
        if key in self._writing or key in self.reading or key in self.kept:
            return True
        return self.dram.order.has_child(key) and key not in self.dram

    @property
    def _num_ready(self) -> int:
        """Slots that are free, or that an eviction frees at once or when a write is done."""
        return self.free_slots + len(self._backed) + len(self._queue) + len(self._worthless)

    def check_integrity(self) -> None:
        """Raise AssertionError if any invariant is broken; between requests."""
        dram, nvme = self.dram.keys(), self.nvme.keys()
        in_use = (self.pinned, self.staged, self.reading, self._writing, self._leaving, self._queue)
        assert not any(in_use), "a request left something behind"
        assert self._backed == dram & nvme
        assert self._worthless <= dram - nvme
        assert self.promoted <= dram
        self.dram.check_integrity(dram | nvme)
        self.nvme.check_integrity(nvme)
