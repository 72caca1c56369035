"""Admit a chain as far as it was seen often enough: keeps one-off prompts out of a small tier.

Seen-twice gating goes back to 2Q (Johnson and Shasha, VLDB 1994). Counting whole chains, once per
request, keeps it prefix-closed: a chunk is never counted more often than the chunk before it.
"""

import numpy as np

from .base import AdmissionPolicy, Answer, Boundary, Chain, Decision, EvictionOrder, Offer, Tier
from .count_min import MOST, CountMinSketch, Counts
from .lru import LruOrder

GATED = frozenset({Boundary.INTO_DRAM, Boundary.NVME_TO_DRAM})


class FrequencyGate(AdmissionPolicy):
    """Needs `min_seen` requests (this one counted) at the boundaries in `gated`.

    history_entries: how many keys are remembered at most; beyond, counts are halved.
    """

    def __init__(
        self,
        *,
        min_seen: int = 2,
        history_entries: int = 262_144,
        gated: frozenset[Boundary] = GATED,
    ) -> None:
        if not 1 <= min_seen <= MOST:
            raise ValueError(f"min_seen is {min_seen}, must be from 1 to {MOST}")
        if history_entries < 1:
            raise ValueError(f"history_entries is {history_entries}, must be at least 1")
        self._min_seen = min_seen
        self._gated = gated
        self._sketch = CountMinSketch(history_entries, most=max(min_seen, 15))

    def observe(self, chain: Chain, now_s: float) -> None:
        self._sketch.add(chain)

    def counts(self, chain: Chain) -> Counts:
        """How many requests had each key, as far as is remembered, up to 15 or min_seen."""
        return self._sketch.counts(chain)

    def decide(self, offer: Offer) -> Decision:
        if offer.boundary not in self._gated:
            return Decision(Answer.ADMIT, len(offer.chain))
        counts = self.counts(offer.chain[offer.start :])
        too_few = np.flatnonzero(counts < self._min_seen)
        if not len(too_few):
            return Decision(Answer.ADMIT, len(offer.chain))
        first = int(too_few[0])
        answer = Answer.ADMIT if first else Answer.REJECT
        reason = f"seen {counts[first]} of {self._min_seen} times"
        return Decision(answer, offer.start + first, reason)

    def order(self, tier: Tier) -> EvictionOrder:
        return LruOrder()

    def save(self) -> bytes:
        return self._sketch.save()

    def restore(self, data: bytes) -> None:
        self._sketch.restore(data)
