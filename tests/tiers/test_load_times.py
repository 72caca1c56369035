from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rootcellar.admission.load_cost import MIN_MEASURED, TRY_EVERY
from rootcellar.tiers.base import Load, Tier
from rootcellar.tiers.config import StoreConfig
from rootcellar.tiers.load_times import LoadTimes
from rootcellar.tiers.store import TieredStore
from rootcellar.tiers.toy import (
    CHUNK_BYTES,
    CHUNK_TOKENS,
    FILE_BYTES,
    LAYOUT,
    NAMESPACE,
    chunks_of,
    keys_of,
)

CHAIN = keys_of((1, 2, 3, 4))
NVME = [Tier.NVME] * 4
TIMEOUT_S = 5.0


@pytest.fixture
def times() -> LoadTimes:
    return LoadTimes(LAYOUT, TIMEOUT_S)


def _measure(times: LoadTimes, *, read_s: float, prefill_s: float) -> None:
    """Per chunk, as often as it takes to be believed."""
    for number in range(MIN_MEASURED):
        read = (Tier.NVME,) * (1 + number % 4)
        load = Load(CHAIN, 0, len(read), read, deadline_s=100.0 + TIMEOUT_S)
        times.observe_load(load, 100.0 + read_s * len(read))
        times.observe_prefill(CHUNK_TOKENS * (1 + number), prefill_s * (1 + number))


def test_what_was_not_measured_is_loaded(times: LoadTimes) -> None:
    assert times.take(CHAIN, 0, NVME) == times.promise(CHAIN, 0, NVME) == 4


def test_a_slow_disk_is_left_alone_and_a_fast_one_is_not(times: LoadTimes) -> None:
    _measure(times, read_s=1.0, prefill_s=0.1)
    assert times.promise(CHAIN, 0, NVME) == 0
    assert times.promise(CHAIN, 0, []) == 0
    _measure(times, read_s=0.01, prefill_s=0.1)
    assert times.promise(CHAIN, 0, NVME) == 4


def test_what_dram_has_before_it_is_always_loaded(times: LoadTimes) -> None:
    _measure(times, read_s=1.0, prefill_s=0.1)
    assert times.take(CHAIN, 0, [Tier.DRAM, Tier.DRAM, Tier.NVME, Tier.NVME]) == 2
    assert times.take(CHAIN, 0, [Tier.DRAM] * 4) == 4


def test_a_load_from_dram_is_no_measurement(times: LoadTimes) -> None:
    _measure(times, read_s=0.01, prefill_s=0.1)
    for _ in range(100):
        times.observe_load(Load(CHAIN, 0, 1, (Tier.DRAM,), deadline_s=105.0), 104.0)
    assert times.take(CHAIN, 0, NVME) == 4


def test_what_a_lookup_promised_is_loaded_once(times: LoadTimes) -> None:
    _measure(times, read_s=1.0, prefill_s=0.1)
    promised = [times.promise(CHAIN, 0, NVME) for _ in range(TRY_EVERY)]
    assert promised.count(4) == 1  # the one that is tried
    assert [times.take(CHAIN, 0, NVME) for _ in range(2)] == [4, 0]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    config = StoreConfig(
        dram_bytes=8 * CHUNK_BYTES,
        nvme_path=tmp_path / "store",
        nvme_bytes=32 * FILE_BYTES,
        io="threads",
    )
    with TieredStore(config, NAMESPACE) as first:
        first.put(CHAIN, chunks_of((1, 2, 3, 4)))
    with TieredStore(replace(config, load_timeout_s=TIMEOUT_S), NAMESPACE) as opened:
        yield opened


def test_a_run_ends_where_loading_stops_paying(store: TieredStore) -> None:
    _measure(store._cold.load_times, read_s=1.0, prefill_s=1e-6)
    found = store.lookup(CHAIN)
    assert (found.num_chunks, found.num_tokens, found.tiers) == (0, 0, ())
    assert found.why_not == "not worth loading"
    load = store.prepare_load(CHAIN)
    assert (load.stop, load.why_not) == (0, "not worth loading")
    store.complete_load(load)


def test_the_store_times_its_own_reads(store: TieredStore) -> None:
    for _ in range(MIN_MEASURED):
        store.wait_load(load := store.prepare_load(CHAIN))
        store.complete_load(load)
        store._cold.dram.clear(store._cold.policy.order(Tier.DRAM))
        store.observe_prefill(CHUNK_TOKENS, 1e-9)
    assert store.lookup(CHAIN).why_not == "not worth loading"
    for _ in range(64):  # what was never seen before is not believed at once
        store.observe_prefill(CHUNK_TOKENS, 60.0)
    assert store.lookup(CHAIN).num_chunks == 4
