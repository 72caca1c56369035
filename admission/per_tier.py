"""The orders that a policy gave out, for policies that tell them of each request."""

from collections.abc import Callable
from typing import Generic, TypeVar

from .base import Chain, Tier
from .leaf_first import LeafFirstOrder

OrderT = TypeVar("OrderT", bound=LeafFirstOrder)


class PerTier(Generic[OrderT]):
    """The newest order of each tier: a new one is made when the store is invalidated."""

    def __init__(self, make: Callable[[], OrderT]) -> None:
        self._make = make
        self._orders: dict[Tier, OrderT] = {}

    def new(self, tier: Tier) -> OrderT:
        self._orders[tier] = order = self._make()
        return order

    def request(self, chain: Chain) -> None:
        for order in self._orders.values():
            order.request(chain)
