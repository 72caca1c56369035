"""Counters of what the store did since it opened; stats() adds the gauges."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ..admission.base import Boundary, Tier

MAX_REASONS = 256


@dataclass(slots=True)
class Metrics:
    hit_chunks: Counter[Tier] = field(default_factory=Counter[Tier])
    hit_tokens: Counter[Tier] = field(default_factory=Counter[Tier])
    missed_chunks: int = 0
    """Chunks that loads asked for and did not get."""
    admitted_chunks: int = 0
    promoted_chunks: int = 0
    wasted_promotions: int = 0
    """Promoted chunks that left DRAM without having served another load."""
    dropped_stores: int = 0
    """Chunks reserved for a store that did not succeed."""
    late_loads: int = 0
    refusals: Counter[str] = field(default_factory=Counter[str])
    """Chunks refused, by boundary and reason."""

    def refuse(self, boundary: Boundary, why: str, num_chunks: int) -> None:
        """Reasons may hold numbers: past MAX_REASONS, new ones count together."""
        if num_chunks:
            reason = f"{boundary}: {why}"
            if reason not in self.refusals and len(self.refusals) >= MAX_REASONS:
                reason = f"{boundary}: other"
            self.refusals[reason] += num_chunks

    def snapshot(self) -> dict[str, Any]:
        """As plain numbers and dicts, ready for JSON."""
        return {
            "hit_chunks": {tier.value: self.hit_chunks[tier] for tier in (Tier.DRAM, Tier.NVME)},
            "hit_tokens": {tier.value: self.hit_tokens[tier] for tier in (Tier.DRAM, Tier.NVME)},
            "missed_chunks": self.missed_chunks,
            "admitted_chunks": self.admitted_chunks,
            "promoted_chunks": self.promoted_chunks,
            "wasted_promotions": self.wasted_promotions,
            "dropped_stores": self.dropped_stores,
            "late_loads": self.late_loads,
            "refusals": dict(self.refusals),
        }
