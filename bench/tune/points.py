"""The cells of a document as a reader takes them: one point per trace, policy and size, over its
seeds, between the curves of exact LRU and of the optimal policy."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .rounded import size

Document = Mapping[str, Any]
Cell = Mapping[str, Any]

DEFAULTS = ("default", "learned")
"""The names of the policy that a store has when nothing else is said."""

CEILINGS = ("opt", "optimal")
"""The names of the policy that knows the future: what it reaches cannot be bought."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One policy at one size; the cells are its seeds."""

    policy: str
    dram_bytes: int
    nvme_bytes: int
    """0 without the tier."""
    cells: tuple[Cell, ...]

    @property
    def size_bytes(self) -> int:
        return self.dram_bytes + self.nvme_bytes

    @property
    def hit(self) -> float:
        """Prefix hits over chunk references, mean over the seeds."""
        return sum(float(cell["prefix_hit"]) for cell in self.cells) / len(self.cells)

    @property
    def spread(self) -> tuple[float, float]:
        """The lowest and the highest hit of a seed."""
        hits = [float(cell["prefix_hit"]) for cell in self.cells]
        return min(hits), max(hits)

    def mean(self, name: str) -> float | None:
        """Of a field over the seeds that know it; None when none does."""
        known = [float(cell[name]) for cell in self.cells if cell.get(name) is not None]
        return sum(known) / len(known) if known else None

    def tier_hit(self, tier: str) -> float | None:
        """Hits served from `tier` (dram or nvme) over all references, mean over the seeds."""
        tiers = [cell.get("hits_by_tier") or {} for cell in self.cells]
        known = [float(hits[tier]) for hits in tiers if hits.get(tier) is not None]
        return sum(known) / len(known) if known else None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Curve:
    """Hits over capacity, ascending; every array has one value per size."""

    sizes: NDArray[np.float64]
    """Bytes."""
    low: NDArray[np.float64]
    mean: NDArray[np.float64]
    high: NDArray[np.float64]

    def hit_at(self, size_bytes: float) -> float:
        return float(np.interp(size_bytes, self.sizes, self.mean))

    def size_for(self, hit: float) -> float | None:
        """The least bytes that reach `hit`; None where no size does."""
        reached = np.flatnonzero(self.mean >= hit)
        return float(self.sizes[reached[0]]) if len(reached) else None


def trace_names(document: Document) -> list[str]:
    """In the order of the document; cells of a trace that it does not describe come last."""
    named = [str(trace["trace"]) for trace in document.get("traces") or ()]
    return list(dict.fromkeys(named + [str(cell["trace"]) for cell in _cells(document)]))


def trace_facts(document: Document, trace: str) -> Mapping[str, Any]:
    """The entry of `trace`, empty when there is none."""
    found = (facts for facts in document.get("traces") or () if facts["trace"] == trace)
    return next(found, {})


def points_of(document: Document, trace: str) -> list[Point]:
    """In order of first appearance; cells that lack a hit rate or a size are passed over."""
    groups: dict[tuple[str, int, int], list[Cell]] = {}
    for cell in _cells(document):
        known = cell.get("prefix_hit") is not None and cell.get("dram_bytes") is not None
        if cell["trace"] == trace and known:
            key = (str(cell["policy"]), int(cell["dram_bytes"]), int(cell.get("nvme_bytes") or 0))
            groups.setdefault(key, []).append(cell)
    return [
        Point(policy=policy, dram_bytes=dram, nvme_bytes=nvme, cells=tuple(cells))
        for (policy, dram, nvme), cells in groups.items()
    ]


def online(points: Iterable[Point]) -> list[Point]:
    """Those of policies that do not know the future."""
    return [point for point in points if point.policy not in CEILINGS]


def tiers_text(point: Point) -> str:
    """64 GiB of DRAM and 1 TiB of NVMe."""
    nvme = f" and {size(point.nvme_bytes)} of NVMe" if point.nvme_bytes else ""
    return f"{size(point.dram_bytes)} of DRAM{nvme}"


def bytes_per_chunk(document: Document, trace: str) -> float | None:
    """Of this trace's chunks, which need not have the size of the model's."""
    model = document.get("model") or {}
    tokens = trace_facts(document, trace).get("chunk_tokens")
    per_token = model.get("kv_bytes_per_token")
    if tokens and per_token:
        return float(tokens) * float(per_token)
    return float(model["chunk_bytes"]) if model.get("chunk_bytes") else None


def curve_of(document: Document, trace: str, policy: str) -> Curve | None:
    """The exact curve of `policy` ("lru" or "optimal"), or None where there is none."""
    chunk_bytes = bytes_per_chunk(document, trace)
    seeds = [
        curve
        for curve in document.get("curves") or ()
        if curve["trace"] == trace and curve["policy"] == policy and curve.get("chunks")
    ]
    if not seeds or not chunk_bytes:
        return None
    chunks = np.unique(np.concatenate([np.asarray(seed["chunks"], np.float64) for seed in seeds]))
    hits = np.stack([np.interp(chunks, seed["chunks"], seed["hit"]) for seed in seeds])
    return Curve(sizes=chunks * chunk_bytes, low=hits.min(0), mean=hits.mean(0), high=hits.max(0))


def knee_of(document: Document, trace: str) -> dict[str, float] | None:
    """hit_share, bytes, tokens and slope_past of the knee, mean over the seeds that have one."""
    names = ("hit_share", "bytes", "tokens", "slope_past")
    knees = [
        knee
        for knee in document.get("knees") or ()
        if knee["trace"] == trace and all(knee.get(name) is not None for name in names)
    ]
    if not knees:
        return None
    return {name: sum(float(knee[name]) for knee in knees) / len(knees) for name in names}


def budget_of(document: Document) -> Point | None:
    """What the user has or may buy, as a point without cells; None when nothing was said."""
    said = document.get("budget") or {}
    dram, nvme = int(said.get("dram_bytes") or 0), int(said.get("nvme_bytes") or 0)
    if not dram + nvme:
        return None
    return Point(policy="", dram_bytes=dram, nvme_bytes=nvme, cells=())


def _cells(document: Document) -> Sequence[Cell]:
    return document.get("cells") or ()
