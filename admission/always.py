"""Admit everything, evict the least recently used leaf: the yardstick for every other policy."""

from .base import AdmissionPolicy, Answer, Chain, Decision, EvictionOrder, Offer, Tier
from .lru import LruOrder


class Always(AdmissionPolicy):
    def observe(self, chain: Chain, now_s: float) -> None:
        """Nothing is learned."""

    def decide(self, offer: Offer) -> Decision:
        return Decision(Answer.ADMIT, len(offer.chain))

    def order(self, tier: Tier) -> EvictionOrder:
        return LruOrder()
