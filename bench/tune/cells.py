"""One cell of the document: what one policy with one capacity did to one trace, in fractions, bytes
and seconds. Hits are fractions of chunk references."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .counts import TierCounts
from .device import Device, estimate
from .models import ModelShape
from .sizes import Capacity
from .trace import Trace

BINS = 60
_DAY_S = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Prefix hits, in chunks, of the optimal policy and of LRU with the same capacity."""

    optimal: int
    lru: int | None


def describe(
    trace: Trace,
    capacity: Capacity,
    counts: TierCounts,
    bounds: Bounds,
    model: ModelShape,
    device: Device,
) -> dict[str, Any]:
    """All of a cell that follows from what was counted; null where it cannot be known."""
    hits = int(counts.hits.sum(dtype=np.int64))
    return {
        "refs": trace.refs,
        "distinct": trace.distinct,
        "prefix_hit": hits / trace.refs,
        "prefix_hit_last_half": _last_half(trace, counts.hits),
        "plain_hit": counts.plain_hits / trace.refs,
        "hits_by_tier": {
            "dram": int(counts.dram_hits.sum(dtype=np.int64)) / trace.refs,
            "nvme": int(counts.nvme_hits.sum(dtype=np.int64)) / trace.refs,
        },
        "nvme_chunk_writes": counts.nvme_chunk_writes,
        "chunk_writes": counts.chunk_writes,
        **_sizes(trace, capacity, model),
        "hole_loss": (counts.plain_hits - hits) / trace.refs,
        "regret": (bounds.optimal - hits) / trace.refs,
        "gap_closed": _gap_closed(hits, bounds),
        **_wear(trace, capacity, counts, model, device),
        "promotions": counts.promotions,
        "wasted_promotions": counts.wasted_promotions,
        "refusals": dict(counts.refusals),
        **_latency(trace, counts, model, device),
        "timeline": timeline(trace, counts),
    }


def timeline(trace: Trace, counts: TierCounts) -> list[dict[str, float]]:
    """BINS of equal length or, of a trace without duration, one; those without references are left
    out. `hour` is where a bin begins."""
    bin_s = trace.duration_s / BINS or 1.0
    bins = np.minimum(trace.times_s / bin_s, BINS - 1).astype(np.int64)
    columns = (np.diff(trace.offsets), counts.dram_hits, counts.nvme_hits)
    refs, dram, nvme = (np.bincount(bins, weights=column, minlength=BINS) for column in columns)
    return [
        {
            "hour": index * bin_s / 3600,
            "dram": dram[index] / refs[index],
            "nvme": nvme[index] / refs[index],
        }
        for index in np.flatnonzero(refs).tolist()
    ]


def _last_half(trace: Trace, hits: NDArray[np.int32]) -> float | None:
    """Of the requests from num_requests // 2 on; None when these refer to nothing."""
    middle = trace.num_requests // 2
    refs = trace.refs - int(trace.offsets[middle])
    return int(hits[middle:].sum(dtype=np.int64)) / refs if refs else None


def _sizes(trace: Trace, capacity: Capacity, model: ModelShape) -> dict[str, int]:
    chunk_bytes = model.chunk_bytes(trace.chunk_tokens)
    return {
        "dram_chunks": capacity.dram_chunks,
        "nvme_chunks": capacity.nvme_chunks,
        "dram_bytes": capacity.dram_chunks * chunk_bytes,
        "nvme_bytes": capacity.nvme_chunks * chunk_bytes,
    }


def _gap_closed(hits: int, bounds: Bounds) -> float | None:
    if bounds.lru is None or bounds.optimal <= bounds.lru:
        return None
    return (hits - bounds.lru) / (bounds.optimal - bounds.lru)


def _wear(
    trace: Trace, capacity: Capacity, counts: TierCounts, model: ModelShape, device: Device
) -> dict[str, float | None]:
    """Bytes as the store writes them; of drive writes a day also what the drive adds."""
    hits = int(counts.nvme_hits.sum(dtype=np.int64))
    written_bytes = counts.nvme_chunk_writes * model.chunk_bytes(trace.chunk_tokens)
    timed = capacity.nvme_chunks > 0 and trace.duration_s > 0
    return {
        "nvme_bytes_per_hit_byte": counts.nvme_chunk_writes / hits if hits else None,
        "nvme_tb_per_day": written_bytes / 1e12 / trace.duration_s * _DAY_S if timed else None,
        "nvme_dwpd": device.nvme_writes_per_day(written_bytes, trace.duration_s) if timed else None,
    }


def _latency(
    trace: Trace, counts: TierCounts, model: ModelShape, device: Device
) -> dict[str, float]:
    """Of each request by itself: nobody queues."""
    chunks = np.diff(trace.offsets) * trace.chunk_tokens
    tokens = np.where(trace.input_tokens > 0, trace.input_tokens, chunks)
    dram = counts.dram_hits.astype(np.int64) * trace.chunk_tokens
    nvme = counts.nvme_hits.astype(np.int64) * trace.chunk_tokens
    found = estimate(device, model, tokens, dram, nvme)
    with_cache, without = (np.percentile(s, (50, 95)) for s in (found.ttft_s, found.ttft_cold_s))
    total_s = float(found.prefill_cold_s.sum())
    return {
        "prefill_s_saved": total_s - float(found.prefill_s.sum()),
        "prefill_s_total": total_s,
        "ttft_p50_s": float(with_cache[0]),
        "ttft_p95_s": float(with_cache[1]),
        "ttft_p50_no_cache_s": float(without[0]),
        "ttft_p95_no_cache_s": float(without[1]),
    }
