"""A policy for tests that refuses some chunks, holds others worth more, and never says why."""

from collections.abc import Callable

from ..admission.always import Always
from ..admission.base import Answer, Boundary, Chain, Decision, EvictionOrder, Key, Offer, Tier
from ..admission.lru import LruOrder


def worth_of(key: Key) -> float:
    """From 0 to 9, and equal for equal keys; a chunk below 2 is refused by NVMe."""
    return key[0] % 10


class ValuedOrder(LruOrder):
    """Least recently used, among those worth less than what would take their place."""

    def victim(self, busy: Callable[[Key], bool], worth: float | None = None) -> Key | None:
        if worth is None:
            return super().victim(busy)
        return super().victim(lambda key: worth_of(key) >= worth or busy(key))


class Choosy(Always):
    """Lets a chain into DRAM up to the first chunk worth nothing, and puts a worth on the rest."""

    def __init__(self) -> None:
        self.observed: list[Chain] = []

    def observe(self, chain: Chain, now_s: float) -> None:
        self.observed.append(chain)

    def decide(self, offer: Offer) -> Decision:
        floor = 2 if offer.boundary is Boundary.ONTO_NVME else 1
        worth: list[float] = []
        for key in offer.chain[offer.start :]:
            if worth_of(key) < floor:
                break
            worth.append(worth_of(key))
        stop = offer.start + len(worth)
        answer = Answer.ADMIT if worth else Answer.REJECT
        return Decision(answer, stop, "of no worth", worth)

    def order(self, tier: Tier) -> EvictionOrder:
        return ValuedOrder()
