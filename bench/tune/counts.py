"""What a policy did with a trace, by request and tier, and how a cell of the document says it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .lru import Counts

Chunks = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TierCounts:
    """In chunks.

    dram_hits, nvme_hits: by request, chunks of its leading run that the tier served.
    plain_hits: chunks of requests that were in either tier when they arrived, leading or not.
    chunk_writes: chunks that a store admitted, each time it did. nvme_chunk_writes: those written
        to NVMe. promotions: from NVMe to DRAM; wasted are those that served nobody there.
    refusals: chunks by boundary and reason.
    """

    dram_hits: Chunks
    nvme_hits: Chunks
    plain_hits: int
    chunk_writes: int
    nvme_chunk_writes: int = 0
    promotions: int = 0
    wasted_promotions: int = 0
    refusals: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def hits(self) -> Chunks:
        """By request, its leading run in either tier."""
        return self.dram_hits + self.nvme_hits


def of_one_tier(counts: Counts, *, below_dram: bool = False) -> TierCounts:
    """below_dram: the one tier stands for both, and what it admits would go down to NVMe once."""
    return TierCounts(
        dram_hits=counts.hits,
        nvme_hits=np.zeros_like(counts.hits),
        plain_hits=counts.plain_hits,
        chunk_writes=counts.chunk_writes,
        nvme_chunk_writes=counts.chunk_writes if below_dram else 0,
    )
