"""Admit a chain as far as it was seen often enough: keeps one-off prompts out of a small tier.

Seen-twice gating goes back to 2Q (Johnson and Shasha, VLDB 1994). Counting whole chains, once per
request, keeps it prefix-closed: a chunk is never counted more often than the chunk before it.
"""

from collections import OrderedDict

from .base import (
    AdmissionPolicy,
    Answer,
    Boundary,
    Chain,
    Decision,
    EvictionOrder,
    Key,
    Offer,
    Tier,
)
from .lru import LruOrder

GATED = frozenset({Boundary.INTO_DRAM, Boundary.NVME_TO_DRAM})


class FrequencyGate(AdmissionPolicy):
    """Needs `min_seen` requests (this one counted) at the boundaries in `gated`.

    history_entries bounds the memory of what was seen: the keys unused for longest are forgotten.
    """

    def __init__(
        self,
        *,
        min_seen: int = 2,
        history_entries: int = 262_144,
        gated: frozenset[Boundary] = GATED,
    ) -> None:
        for name, value in (("min_seen", min_seen), ("history_entries", history_entries)):
            if value < 1:
                raise ValueError(f"{name} is {value}, must be at least 1")
        self._min_seen = min_seen
        self._history_entries = history_entries
        self._gated = gated
        self._seen: OrderedDict[Key, int] = (
            OrderedDict()
        )  # oldest use first, a tail before its head

    def observe(self, chain: Chain, now_s: float) -> None:
        seen = self._seen
        for key in reversed(chain[: self._history_entries]):
            seen[key] = seen.pop(key, 0) + 1
        while len(seen) > self._history_entries:
            seen.popitem(last=False)

    def decide(self, offer: Offer) -> Decision:
        if offer.boundary not in self._gated:
            return Decision(Answer.ADMIT, len(offer.chain))
        for index in range(offer.start, len(offer.chain)):
            seen = self._seen.get(offer.chain[index], 0)
            if seen < self._min_seen:
                answer = Answer.ADMIT if index > offer.start else Answer.REJECT
                return Decision(answer, index, f"seen {seen} of {self._min_seen} times")
        return Decision(Answer.ADMIT, len(offer.chain))

    def order(self, tier: Tier) -> EvictionOrder:
        return LruOrder()
