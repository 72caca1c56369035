"""The store's numbers on vLLM's own /metrics, beside the engine's."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from ...tiers.store import TieredStore
from .lookups import Lookups

PERIOD_S = 0.2
"""Numbers are told at most this often; the last ones always are."""

_PREFIX = "rootcellar:"

Sample = tuple[str, tuple[str, ...], float]

_LATENCY_BUCKETS = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)

_COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "hit_tokens": ("Tokens loaded, by the tier that had them.", ("tier",)),
    "hit_chunks": ("Chunks loaded, by the tier that had them.", ("tier",)),
    "hit_bytes": ("Bytes loaded, by the tier that had them.", ("tier",)),
    "missed_chunks": ("Chunks of requests that no tier had, or had in time.", ()),
    "stored_chunks": ("Chunks stored into DRAM.", ()),
    "dropped_stores": ("Chunks whose copy into DRAM failed, or was given up.", ()),
    "promoted_chunks": ("Chunks read from NVMe that stayed in DRAM.", ()),
    "wasted_promotions": ("Promoted chunks that left DRAM without serving again.", ()),
    "refused_chunks": ("Chunks refused, by boundary and reason.", ("boundary", "reason")),
    "lost_chunks": ("Chunks that left or never reached a tier, by reason.", ("reason",)),
    "late_loads": ("Loads cut short because NVMe did not answer in time.", ()),
    "nvme_written_bytes": ("Bytes written to chunk files.", ()),
    "corrupt_chunks": ("Chunks on NVMe that failed verification; dropped, recomputed.", ()),
    "io_restarts": ("Times the IO process had to be started again.", ()),
}

_GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "used_bytes": ("Bytes in use, by tier.", ("tier",)),
    "capacity_bytes": ("Bytes this engine may use, by tier.", ("tier",)),
    "pinned_slots": ("DRAM slots pinned by loads.", ()),
    "open_loads": ("Loads begun and not completed.", ()),
    "writes_pending": ("Chunks in DRAM that wait for their write to NVMe.", ()),
    "undecided_chunks": (
        "Chunks in DRAM whose write to NVMe is not decided yet.",
        (),
    ),
    "io_jobs": ("Jobs under way on the IO side.", ()),
    "io_alive": ("1 while the IO side works, 0 while DRAM goes on alone.", ()),
}

_HISTOGRAMS = {
    "load_seconds": "From a load's start in the scheduler to its completion by all workers.",
    "store_seconds": "From a store's start in the scheduler to its completion by all workers.",
}


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Under vLLM's names; a counter's gets the suffix _total from the Prometheus client."""
    definitions: dict[str, OffloadingMetricMetadata] = {}
    for name, (text, labels) in _COUNTERS.items():
        definitions[_full(name)] = OffloadingCounterMetadata(text, labels)
    for name, (text, labels) in _GAUGES.items():
        definitions[_full(name)] = OffloadingGaugeMetadata(text, labels)
    for name, text in _HISTOGRAMS.items():
        definitions[_full(name)] = OffloadingHistogramMetadata(text, buckets=_LATENCY_BUCKETS)
    return definitions


def unregister_metrics() -> None:
    """Of an engine that was in this process before: vLLM takes away only what bears its name."""
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "").startswith(_PREFIX):
            REGISTRY.unregister(collector)


class Metrics:
    """Tells vLLM what the store counted since it was last told."""

    def __init__(self, store: TieredStore, lookups: Lookups) -> None:
        self._store = store
        self._lookups = lookups
        self._told: dict[tuple[str, tuple[str, ...]], float] = {}
        self._told_s = 0.0
        self._news = True
        self._latencies: list[tuple[str, float]] = []

    def loaded(self, seconds: float) -> None:
        self._latencies.append(("load_seconds", seconds))
        self._news = True

    def stored(self, seconds: float) -> None:
        self._latencies.append(("store_seconds", seconds))
        self._news = True

    @property
    def due(self) -> bool:
        """Whether there is anything to tell yet."""
        return self._news

    def take(self) -> OffloadingConnectorStats | None:
        now_s = time.monotonic()
        if not self._news or now_s - self._told_s < PERIOD_S:
            return None
        self._told_s, self._news = now_s, self._store.busy
        stats = self._store.stats()
        told = OffloadingConnectorStats()
        missed: Sample = ("missed_chunks", (), self._lookups.missed_chunks)
        for name, labels, value in [missed, *_counters(stats)]:
            more = value - self._told.get((name, labels), 0)
            if more or (name, labels) not in self._told:  # a rate needs a zero to begin from
                told.increase_counter(_full(name), more, labels)
            self._told[name, labels] = value
        for name, labels, value in _gauges(stats):
            told.set_gauge(_full(name), value, labels)
        for name, seconds in self._latencies:
            told.observe_histogram(_full(name), seconds)
        self._latencies.clear()
        return told


def _counters(stats: Mapping[str, Any]) -> Iterator[Sample]:
    for tier in ("dram", "nvme"):
        yield "hit_tokens", (tier,), stats["hit_tokens"][tier]
        yield "hit_chunks", (tier,), stats["hit_chunks"][tier]
        yield "hit_bytes", (tier,), stats["hit_chunks"][tier] * stats["dram"]["slot_bytes"]
    yield "dropped_stores", (), stats["dropped_stores"]
    yield "stored_chunks", (), stats["admitted_chunks"]
    yield "promoted_chunks", (), stats["promoted_chunks"]
    yield "wasted_promotions", (), stats["wasted_promotions"]
    yield "late_loads", (), stats["late_loads"]
    for refusal, count in stats["refusals"].items():
        boundary, _, reason = refusal.partition(": ")
        yield "refused_chunks", (boundary, reason), count
    for reason, count in stats["why_not"].items():
        yield "lost_chunks", (reason,), count
    if (nvme := stats["nvme"]) is None:
        return
    yield "nvme_written_bytes", (), nvme["bytes_written"]
    yield "corrupt_chunks", (), nvme["corrupt_chunks"]
    yield "io_restarts", (), nvme["io_restarts"]


def _gauges(stats: Mapping[str, Any]) -> Iterator[Sample]:
    dram = stats["dram"]
    yield "used_bytes", ("dram",), dram["slots_used"] * dram["slot_bytes"]
    yield "capacity_bytes", ("dram",), dram["slots"] * dram["slot_bytes"]
    yield "pinned_slots", (), dram["slots_pinned"]
    yield "open_loads", (), stats["open_loads"]
    if (nvme := stats["nvme"]) is None:
        return
    yield "used_bytes", ("nvme",), nvme["used_bytes"]
    yield "capacity_bytes", ("nvme",), nvme["budget_bytes"]
    yield "writes_pending", (), stats["writes_pending"]
    yield "undecided_chunks", (), dram["slots_undecided"]
    yield "io_jobs", (), nvme["jobs_in_flight"]
    yield "io_alive", (), nvme["io_alive"]


def _full(name: str) -> str:
    return _PREFIX + name
