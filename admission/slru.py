"""Admit everything into segmented orders: the yardstick for what segments alone are worth."""

from .segmented import SegmentedOrder
from .ungated import Ungated


class Slru(Ungated):
    def __init__(self) -> None:
        super().__init__(SegmentedOrder)
