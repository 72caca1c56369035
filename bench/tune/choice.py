"""Which of the measured points is worth its bytes, and what else stands at its size."""

from collections.abc import Iterable
from math import log2

from .points import CEILINGS, DEFAULTS, Document, Point, curve_of, online, points_of

SAME = 0.005
"""Hits that differ by no more are the same to a buyer (fraction of references)."""

WORTH_A_DOUBLING = 0.02
"""Twice the price is worth paying when it brings more hits than this (fraction of references)."""

DRAM_PRICE = 10
"""A byte of DRAM costs about as much as so many bytes of NVMe."""


def choose(measured: Iterable[Point]) -> Point | None:
    """The point to recommend: from the best one down to the next that is a better buy, and so on.

    A cheaper one is a better buy if it gives the same hits, or gives up no more than
    WORTH_A_DOUBLING for each halving of the price. Among policies at one price the default is
    preferred. Those that know the future are never recommended.
    """
    candidates = online(measured)
    if not candidates:
        return None
    chosen = min(candidates, key=lambda point: (-point.hit, _cost(point)))
    while better := [point for point in candidates if _is_better_buy(point, chosen)]:
        chosen = max(better, key=lambda point: (price(point), point.hit))
    return chosen


def price(point: Point) -> int:
    """In bytes of NVMe."""
    return DRAM_PRICE * point.dram_bytes + point.nvme_bytes


def fits(point: Point, room: Point) -> bool:
    """Whether `point` takes no more of either tier than `room` has."""
    return point.dram_bytes <= room.dram_bytes and point.nvme_bytes <= room.nvme_bytes


def same_size(measured: Iterable[Point], chosen: Point) -> list[Point]:
    """All policies that were measured with as much of each tier."""
    sizes = (chosen.dram_bytes, chosen.nvme_bytes)
    return [point for point in measured if (point.dram_bytes, point.nvme_bytes) == sizes]


def lru_hit(document: Document, trace: str, chosen: Point) -> float | None:
    """What LRU reaches with as much of each tier, or, of one tier, by its exact curve."""
    for point in same_size(points_of(document, trace), chosen):
        if point.policy == "lru":
            return point.hit
    curve = None if chosen.nvme_bytes else curve_of(document, trace, "lru")
    return curve.hit_at(chosen.size_bytes) if curve else None


def best_hit(document: Document, trace: str, chosen: Point) -> float | None:
    """What the optimal policy reaches with as many bytes."""
    if curve := curve_of(document, trace, "optimal"):
        return max(curve.hit_at(chosen.size_bytes), chosen.hit)
    for point in same_size(points_of(document, trace), chosen):
        if point.policy in CEILINGS:
            return max(point.hit, chosen.hit)
    return None


def rated_dwpd(document: Document) -> float | None:
    """Drive writes a day that the stated drive is made for."""
    rated = (document.get("device") or {}).get("drive_dwpd")
    return float(rated) if rated else None


def _is_better_buy(point: Point, chosen: Point) -> bool:
    halvings = log2(max(1, price(chosen)) / max(1, price(point)))
    affordable = max(SAME, WORTH_A_DOUBLING * halvings)
    return _cost(point) < _cost(chosen) and chosen.hit - point.hit <= affordable


def _cost(point: Point) -> tuple[int, bool]:
    return price(point), point.policy not in DEFAULTS
