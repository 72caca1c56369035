"""A whole policy that can be explained in a sentence: what was asked for twice, and is long enough,
may enter; what was asked for again while it was there stays longest. Right for small tiers."""

import struct
from collections.abc import Mapping
from dataclasses import replace

from .base import AdmissionPolicy, Answer, Boundary, Chain, Decision, EvictionOrder, Offer, Tier
from .frequency_gate import FrequencyGate
from .min_length import MinLength
from .per_tier import PerTier
from .segmented import SegmentedOrder
from .write_budget import WriteBudget

BUDGET_IS_SPENT = "write budget is spent"
_HISTORY_BEFORE_OPEN = 262_144
_MOST_HISTORY = 1 << 20
_HEAD = struct.Struct("<8sQ")
_MAGIC = b"rcgated1"


class Gated(AdmissionPolicy):
    """min_seen: requests with a chunk, the present one counted, before it is admitted; default 2.
    min_chunks: length of a chain before any of it is admitted; default 1, which keeps all.
    history: keys that are remembered, as a multiple of the chunks of the largest tier; default 8.
    protected_share: of a tier's chunks, at most this share is protected; default 0.5.
    write_budget: of what goes onto NVMe; None, the default, sets no limit.

    The gates stand open for an offer that fits into what is free, so that an empty tier fills.
    """

    def __init__(
        self,
        *,
        min_seen: int = 2,
        min_chunks: int = 1,
        history: float = 8.0,
        protected_share: float = 0.5,
        write_budget: WriteBudget | None = None,
    ) -> None:
        if not 0 < history <= 1024:
            raise ValueError(f"history is {history}, must be over 0 and at most 1024")
        SegmentedOrder(protected_share=protected_share)  # raises here rather than in order()
        self._min_seen = min_seen
        self._history = history
        self._length = MinLength(min_chunks)
        self._frequency = self._make_gate(_HISTORY_BEFORE_OPEN)
        self._budget = write_budget
        self._orders = PerTier(lambda: SegmentedOrder(protected_share=protected_share))

    def open(self, capacity: Mapping[Tier, int]) -> None:
        largest = max(capacity.values(), default=1)
        entries = min(_MOST_HISTORY, max(1, int(self._history * largest)))
        self._frequency = self._make_gate(entries)

    def observe(self, chain: Chain, now_s: float) -> None:
        self._frequency.observe(chain, now_s)
        self._orders.request(chain)
        if self._budget is not None:
            self._budget.advance(now_s)

    def decide(self, offer: Offer) -> Decision:
        decision = self._pass_gates(offer)
        if self._budget is None or offer.boundary is not Boundary.ONTO_NVME:
            return decision
        return self._pay(self._budget, offer, decision)

    def order(self, tier: Tier) -> EvictionOrder:
        return self._orders.new(tier)

    def save(self) -> bytes:
        tokens = b"" if self._budget is None else self._budget.save()
        return _HEAD.pack(_MAGIC, len(tokens)) + tokens + self._frequency.save()

    def restore(self, data: bytes) -> None:
        if len(data) < _HEAD.size:
            return
        magic, num_tokens = _HEAD.unpack_from(data)
        if magic != _MAGIC:
            return
        rest = data[_HEAD.size :]
        self._frequency.restore(rest[num_tokens:])
        if self._budget is not None:
            self._budget.restore(rest[:num_tokens])

    def _make_gate(self, entries: int) -> FrequencyGate:
        return FrequencyGate(
            min_seen=self._min_seen, history_entries=entries, gated=frozenset(Boundary)
        )

    def _pass_gates(self, offer: Offer) -> Decision:
        if offer.free_chunks >= len(offer.chain) - offer.start:
            return Decision(Answer.ADMIT, len(offer.chain))
        if offer.boundary is not Boundary.ONTO_NVME:  # only there the head may be left out
            decision = self._length.decide(offer)
            if decision.answer is not Answer.ADMIT:
                return decision
        return self._frequency.decide(offer)

    def _pay(self, budget: WriteBudget, offer: Offer, decision: Decision) -> Decision:
        """What was seen more often is the likelier to return. An offer from the start of a chain
        may be of use as a whole only: it is what the cleaner must write to let go of its end."""
        offered = len(offer.chain) - offer.start
        wanted = offer.chain[offer.start : decision.stop]
        if not wanted:
            return decision
        chunk_bytes = -(-offer.write_bytes // offered)
        counts = self._frequency.counts(wanted).tolist()
        granted = budget.spend(chunk_bytes, counts, whole=offer.start == 0)
        if granted == len(wanted):
            return decision
        answer = Answer.ADMIT if granted else Answer.THROTTLE
        return replace(decision, answer=answer, stop=offer.start + granted, reason=BUDGET_IS_SPENT)
