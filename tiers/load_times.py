"""Where loading a run stops paying: the store times its reads, engines tell what they computed."""

from collections.abc import Sequence

from ..admission.base import Chain, Key, Tier
from ..admission.load_cost import LoadCost
from .base import Load
from .layout import KVLayout

NOT_WORTH_LOADING = "not worth loading"
MAX_PROMISED = 4096


class LoadTimes:
    """Only reads from NVMe take the store's time, so a run is cut nowhere before the first.

    What a lookup promised is loaded: the end of each run is remembered, of the last MAX_PROMISED.
    """

    def __init__(self, layout: KVLayout, timeout_s: float) -> None:
        self._layout = layout
        self._timeout_s = timeout_s
        self._cost = LoadCost()
        self._promised: dict[Key, None] = {}

    def promise(self, chain: Chain, start: int, tiers: Sequence[Tier]) -> int:
        """How many chunks of the run chain[start:] in `tiers` a load would bring."""
        num_chunks = self._worth(tiers)
        if num_chunks and _reads(tiers):
            self._promised[chain[start + num_chunks - 1]] = None
            if len(self._promised) > MAX_PROMISED:
                self._promised.clear()
        return num_chunks

    def take(self, chain: Chain, start: int, tiers: Sequence[Tier]) -> int:
        """The same for a load that begins now."""
        if tiers and self._promised.pop(chain[start + len(tiers) - 1], False) is None:
            return len(tiers)
        return self._worth(tiers)

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        self._cost.observe_prefill(num_tokens, seconds)

    def observe_load(self, load: Load, now_s: float) -> None:
        """It is READY with all that was asked for, or has waited too long."""
        num_read = load.tiers.count(Tier.NVME)
        if num_read:
            began_s = load.deadline_s - self._timeout_s
            num_bytes = num_read * self._layout.chunk_bytes
            self._cost.observe_load(Tier.NVME, num_bytes, max(0.0, now_s - began_s))

    def _worth(self, tiers: Sequence[Tier]) -> int:
        if not _reads(tiers):
            return len(tiers)
        layout = self._layout
        worth = self._cost.worth(tiers, layout.chunk_bytes, layout.chunk_tokens)
        return max(worth, tiers.index(Tier.NVME))


def _reads(tiers: Sequence[Tier]) -> bool:
    """Whether NVMe is among them; counting takes no step of Python for each."""
    return tiers.count(Tier.DRAM) < len(tiers)
