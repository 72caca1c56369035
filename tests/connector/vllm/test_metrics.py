"""What the store counts, told to vLLM as it changes."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY, Counter
from vllm.v1.kv_offload.base import OffloadingCounterMetadata

from rootcellar import KVLayout, Namespace, StoreConfig, TieredStore
from rootcellar.connector.vllm import metrics as module
from rootcellar.connector.vllm.lookups import Lookups
from rootcellar.connector.vllm.metrics import Metrics, metric_definitions, unregister_metrics
from rootcellar.connector.vllm.opening import share_log
from rootcellar.connector.vllm.shape import Group, Shape

LAYOUT = KVLayout(
    num_layers=1, kv_factor=1, num_kv_heads=1, head_dim=256, dtype="uint8", chunk_tokens=16
)
KEYS = [bytes([number]) * 32 for number in range(3)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    config = StoreConfig(
        dram_bytes="1MiB", nvme_path=tmp_path / "kv", nvme_bytes="1MiB", io="threads"
    )
    with TieredStore(config, Namespace(model="toy", revision="1", layout=LAYOUT)) as opened:
        yield opened


@pytest.fixture
def told(store: TieredStore, monkeypatch: pytest.MonkeyPatch) -> Metrics:
    monkeypatch.setattr(module, "PERIOD_S", 0.0)
    shape = Shape((Group(0, 16, full_attention=True),), 1, 16, hbm_chunks=8)
    return Metrics(store, Lookups(store, shape, 1.0))


def values(metrics: Metrics) -> dict[str, dict[tuple[str, ...], Any]]:
    stats = metrics.take()
    return {} if stats is None else stats.data["data"]


def test_every_counter_without_reasons_begins_at_zero(told: Metrics) -> None:
    """Or a rate over it would miss all that comes before the second sample."""
    first = values(told)
    for name, definition in metric_definitions().items():
        if isinstance(definition, OffloadingCounterMetadata) and not {"reason"} & set(
            definition.labelnames
        ):
            assert set(first[name].values()) == {0}, name


def test_counters_tell_what_is_new_and_gauges_what_is_now(
    store: TieredStore, told: Metrics
) -> None:
    values(told)
    assert told.take() is None, "nothing happened"
    store.put(KEYS, [torch.ones(LAYOUT.shape(16), dtype=torch.uint8)] * 3)
    assert store.flush()
    store.get(KEYS)
    store.complete_store(store.prepare_store([*KEYS, bytes([9]) * 32], 3), success=False)
    told.loaded(0.25)
    news = values(told)
    assert news["rootcellar:stored_chunks"] == {(): 3}
    assert news["rootcellar:dropped_stores"] == {(): 1}
    assert news["rootcellar:hit_tokens"] == {("dram",): 48}
    assert news["rootcellar:nvme_written_bytes"][()] > 0
    assert news["rootcellar:used_bytes"][("dram",)] == 3 * 4096
    assert news["rootcellar:load_seconds"] == {(): [0.25]}
    told.stored(0.5)
    assert "rootcellar:stored_chunks" not in values(told)


def test_all_that_is_told_is_defined(store: TieredStore, told: Metrics) -> None:
    told.loaded(1.0)
    told.stored(1.0)
    assert set(values(told)) <= set(metric_definitions())


def test_metrics_of_an_engine_that_was_here_before_make_room() -> None:
    counter = Counter("rootcellar:toy", "Of an earlier engine.")
    unregister_metrics()
    assert counter not in REGISTRY._collector_to_names
    REGISTRY.unregister(Counter("rootcellar:toy", "Of the next."))


def test_what_ours_log_goes_where_vllms_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("rootcellar")
    monkeypatch.setattr(ours, "handlers", [])
    monkeypatch.setattr(ours, "level", logging.NOTSET)
    monkeypatch.setattr(ours, "propagate", True)
    share_log()
    assert ours.handlers == theirs.handlers
    assert ours.level == theirs.level
