"""Least frequently used with dynamic ageing (LFU-DA: Arlitt, Cherkasova, Dilley, Friedrich and Jin,
ACM SIGMETRICS PER 2000), leaf first."""

from .base import Key
from .ranked import RankedOrder
from .ungated import Ungated


class LfuOrder(RankedOrder):
    def _cost(self, key: Key) -> float:
        return 1.0


class Lfu(Ungated):
    def __init__(self) -> None:
        super().__init__(LfuOrder)
