"""From the samples of all rounds to numbers: percentiles, speeds, and ratios within a round."""

from __future__ import annotations

import statistics
from typing import Any

from .hit_rivals import ALONE, BY_PAGE, DRAM, MEMCPY, NVME, RAW, Samples, What
from .timing import median_ratio, spread

Rounds = dict[What, list[Samples]]


def rows_of(taken: Rounds, chunk_bytes: int, depth: int) -> list[dict[str, Any]]:
    """A row per rival, and one for all raw reads; a number that does not apply is None."""
    everything = {RAW: _raw_reads(taken), **taken}
    return [
        {
            "chunk_bytes": chunk_bytes,
            "depth": depth,
            "measured": what.name,
            "backend": what.backend or None,
            "engine": what.engine or None,
            **spread([s for samples in rounds for s in samples.latencies_s]),
            **_speeds(what, everything),
        }
        for what, rounds in everything.items()
        if what.name != ALONE
    ]


def _raw_reads(taken: Rounds) -> list[Samples]:
    """Of each round, the raw reads beside all NVMe hits."""
    hits = [rounds for what, rounds in taken.items() if what.name == NVME]
    return [
        Samples([s for hit in a_round for s in hit.raw_s], sum(hit.moved_bytes for hit in a_round))
        for a_round in zip(*hits, strict=True)
    ]


def _speeds(what: What, taken: Rounds) -> dict[str, float | None]:
    """gb_per_s: median over rounds. The ratios: median over rounds of ratios within a round."""
    rounds = taken[what]
    rates = [samples.bytes_per_s for samples in rounds]
    moves, is_hit = rates[0] > 0, what.name in (NVME, DRAM)

    def to(yardstick: What) -> float | None:
        if yardstick not in taken:
            return None
        return median_ratio(rates, [samples.bytes_per_s for samples in taken[yardstick]])

    return {
        "gb_per_s": statistics.median(rates) / 1e9 if moves else None,
        "to_raw": _to_raw(rounds) if what.name == NVME else None,
        "to_memcpy": to(MEMCPY) if is_hit else None,
        "to_page_loop": to(BY_PAGE) if what.name == DRAM else None,
        "engine_keeps": _engine_keeps(what, taken),
    }


def _to_raw(rounds: list[Samples]) -> float:
    return median_ratio(
        [sum(samples.raw_s) for samples in rounds],
        [sum(samples.latencies_s) for samples in rounds],
    )


def _engine_keeps(what: What, taken: Rounds) -> float | None:
    """Steps per second while reads are under way, to those of the same engine alone."""
    alone = taken.get(What(ALONE, what.backend, what.engine))
    if what.name != NVME or alone is None:
        return None
    speeds = [samples.steps_per_s for samples in taken[what]]
    return median_ratio(speeds, [samples.steps_per_s for samples in alone])
