"""Policies that admit everything and differ in what they evict."""

from collections.abc import Callable

from .base import AdmissionPolicy, Answer, Chain, Decision, EvictionOrder, Offer, Tier
from .leaf_first import LeafFirstOrder
from .per_tier import PerTier


class Ungated(AdmissionPolicy):
    """Everything crosses every boundary; `make` makes the order of a tier."""

    def __init__(self, make: Callable[[], LeafFirstOrder]) -> None:
        self._orders = PerTier(make)

    def observe(self, chain: Chain, now_s: float) -> None:
        self._orders.request(chain)

    def decide(self, offer: Offer) -> Decision:
        return Decision(Answer.ADMIT, len(offer.chain))

    def order(self, tier: Tier) -> EvictionOrder:
        return self._orders.new(tier)
