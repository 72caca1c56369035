"""The curves of a document and their knee: what exact LRU and the optimal policy hit with how much
space, of one trace."""

from typing import Any

import numpy as np

from .curve import knee, lru_curve, slope_past
from .models import ModelShape
from .optimal import replay_optimal
from .trace import Trace

POINTS = 200
"""Of a curve, at most."""

OPTIMAL_POINTS = 12
KNEE_SHARE = 0.95


class Curves:
    """LRU at every capacity from one pass; the optimal policy where it is asked, and remembered."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._lru = lru_curve(trace)
        self._optimal: dict[int, int] = {}

    @property
    def infinite(self) -> int:
        """Prefix hits with room for everything."""
        return int(self._lru[-1])

    def lru(self, chunks: int) -> int:
        """Prefix hits with a capacity of so many chunks."""
        return int(self._lru[min(chunks, self._trace.distinct)])

    def optimal(self, chunks: int) -> int:
        if chunks not in self._optimal:
            self._optimal[chunks] = replay_optimal(self._trace, chunks).prefix_hits
        return self._optimal[chunks]

    def points(self) -> list[dict[str, Any]]:
        """`chunks` and `hit` of either curve, densest where it is small; ends with all distinct
        chunks."""
        distinct = self._trace.distinct
        lru = _steps(distinct, POINTS - 1, 1) | {knee(self._lru, KNEE_SHARE) or 1}
        for chunks in sorted(_steps(distinct, OPTIMAL_POINTS, max(1, distinct // 500))):
            if self.optimal(chunks) == self.infinite:
                break
        self._optimal[distinct] = self.infinite
        return [
            self._curve("lru", {chunks: self.lru(chunks) for chunks in lru}),
            self._curve("optimal", self._optimal),
        ]

    def knee(self, model: ModelShape) -> dict[str, Any]:
        chunks = knee(self._lru, KNEE_SHARE)
        tokens = chunks * self._trace.chunk_tokens
        return {
            "hit_share": KNEE_SHARE,
            "chunks": chunks,
            "bytes": tokens * model.bytes_per_token,
            "tokens": tokens,
            "slope_past": slope_past(self._lru, chunks) / self._trace.refs,
        }

    def _curve(self, policy: str, hits: dict[int, int]) -> dict[str, Any]:
        chunks = sorted(hits)
        hit = [hits[capacity] / self._trace.refs for capacity in chunks]
        return {"policy": policy, "chunks": chunks, "hit": hit}


def _steps(distinct: int, count: int, first: int) -> set[int]:
    """About `count` capacities, each the same factor above the one before, up to all."""
    return set(np.unique(np.geomspace(first, distinct, count).round().astype(int)).tolist())
