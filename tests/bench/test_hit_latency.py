import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rootcellar.admission.always import Always
from rootcellar.admission.base import Tier
from rootcellar.bench import hit_latency
from rootcellar.bench.engine_thread import ENGINES, on_cores, run_until_ready, split_cores
from rootcellar.bench.hit_field import open_field
from rootcellar.bench.hit_rivals import MEMCPY, NVME, RAW, Samples, What, open_rivals
from rootcellar.bench.hit_rows import rows_of
from rootcellar.bench.hit_stores import Chunks, files_of, fill, layout_of, open_in_place, twin
from rootcellar.tiers.arena import STEP_BYTES
from rootcellar.tiers.base import LoadState
from rootcellar.tiers.config import StoreConfig
from rootcellar.tiers.store import TieredStore

SMALL = 128 << 10
DEPTHS = (1, 2)


def test_the_engine_has_a_core_of_its_own_only_while_it_is_measured() -> None:
    before = os.sched_getaffinity(0)
    engine, others = split_cores()
    assert len(engine) == 1
    assert engine | others == before
    assert not engine & others or len(before) == 1
    with on_cores(others):
        with on_cores(engine):
            assert os.sched_getaffinity(0) == engine
        assert os.sched_getaffinity(0) == others
    assert os.sched_getaffinity(0) == before


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, steps = tmp_path_factory.mktemp("bench"), list[tuple[int, int]]()
    result = hit_latency.run(
        folder,
        chunk_bytes=(SMALL,),
        depths=DEPTHS,
        rounds=1,
        round_chunks=4,
        progress=lambda done, total: steps.append((done, total)),
    )
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert os.listdir(folder) == []
    found: dict[str, Any] = json.loads(json.dumps(result, allow_nan=False))
    return found


def test_every_hit_is_measured_for_every_backend_and_engine(smoke: dict[str, Any]) -> None:
    rows = {(r["depth"], r["measured"], r["backend"], r["engine"]): r for r in smoke["rows"]}
    assert len(rows) == len(smoke["rows"])
    for depth in DEPTHS:
        requests = 4 // depth
        for backend in ("threads", "process"):
            assert rows[depth, "DRAM hit", backend, None]["count"] == requests
            assert rows[depth, "miss", backend, None]["count"] == requests
            for engine in ("idle", "python", "releasing"):
                row = rows[depth, "NVMe hit", backend, engine]
                assert row["count"] == requests
                assert row["to_raw"] > 0
                assert row["to_memcpy"] > 0
                assert (row["engine_keeps"] is None) == (engine == "idle")
        assert rows[depth, "raw preadv", None, None]["count"] == 6 * requests
        assert rows[depth, "memcpy", None, None]["gb_per_s"] > 0
    assert {row["operation"] for row in smoke["lookups"]} >= {"in DRAM", "on NVMe", "absent"}


def test_every_row_is_in_the_table(smoke: dict[str, Any]) -> None:
    console = Console(width=160)
    with console.capture() as captured:
        console.print(hit_latency.table(smoke))
    lines = captured.get().splitlines()
    for name in {row["measured"] for row in smoke["rows"]}:
        expected = sum(row["measured"] == name for row in smoke["rows"])
        assert sum(re.match(f" +{name}(, | {{2}})", line) is not None for line in lines) == expected
    assert sum("0.125 MiB" in line for line in lines) == len(DEPTHS)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"chunk_bytes": (1000,)}, "chunk_bytes is 1000"),
        ({"depths": (0,)}, "depths are"),
        ({"backends": ("carrier pigeon",)}, "carrier pigeon"),
        ({"backends": ()}, "backends are"),
        ({"rounds": 0}, "rounds is 0"),
        ({"directory": Path("/nowhere/at/all")}, "directory is /nowhere/at/all"),
    ],
)
def test_a_wrong_argument_is_named_before_anything_is_written(
    wrong: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=named):
        hit_latency.run(**{"directory": tmp_path, **wrong})
    assert os.listdir(tmp_path) == []


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    cores = os.sched_getaffinity(0)
    with pytest.raises(KeyboardInterrupt):
        hit_latency.run(
            tmp_path,
            chunk_bytes=(SMALL,),
            depths=(1,),
            backends=("threads",),
            rounds=1,
            round_chunks=2,
            progress=interrupt,
        )
    assert os.listdir(tmp_path) == []
    assert os.sched_getaffinity(0) == cores


@pytest.mark.parametrize("size", [SMALL, 1 << 20, 2 << 20, 32 << 20, 3 * SMALL])
def test_a_layout_has_chunks_of_the_size_asked_for(size: int) -> None:
    assert layout_of(size).chunk_bytes == size


def test_the_layouts_of_the_usual_sizes_have_the_pages_they_should() -> None:
    big, small = layout_of(32 << 20), layout_of(1 << 20)
    assert (big.num_layers, big.num_kv_heads) == (32, 8)
    assert (small.num_layers, small.num_kv_heads) == (4, 2)


def test_each_store_reads_every_chunk_from_disk_every_time(tmp_path: Path) -> None:
    chunks = Chunks.of_size(SMALL, 0)
    with open_field(tmp_path, chunks, 4, (2,), ("threads", "process"), 0) as field:
        for store in field.stores.values():
            before = store.stats()["hit_chunks"]
            for _ in range(2):
                load = store.prepare_load(field.on_nvme, 2)
                assert load.tiers == (Tier.NVME,) * 2
                store.wait_load(load)
                store.complete_load(load)
            after = store.stats()["hit_chunks"]
            assert after["nvme"] - before["nvme"] == 4
            store.check_integrity()


def test_a_hit_that_is_cut_short_is_an_error_and_not_a_fast_one(tmp_path: Path) -> None:
    chunks = Chunks.of_size(SMALL, 0)
    with (
        open_field(tmp_path, chunks, 2, (1,), ("threads",), 0) as field,
        open_rivals(field, 1, None) as rivals,
    ):
        rival = rivals[What(NVME, "threads", "idle")]
        assert len(rival().latencies_s) == 2
        field.files[1].unlink()
        with pytest.raises(OSError, match="1 chunks from nvme was cut short: missing"):
            rival()


def test_wrong_bytes_are_noticed_before_anything_is_measured(tmp_path: Path) -> None:
    with open_field(tmp_path, Chunks.of_size(SMALL, 0), 2, (1,), ("threads",), 0) as field:
        field.check()
        with pytest.raises(AssertionError, match="bytes of chunk 0"):
            replace(field, chunks=Chunks.of_size(SMALL, 1)).check()


def test_a_store_to_measure_has_all_its_memory(tmp_path: Path) -> None:
    chunks, num_slots = Chunks.of_size(SMALL, 0), 6 * STEP_BYTES // SMALL
    fill(tmp_path / "s", chunks, chunks.chain("x", 1))
    with open_in_place(tmp_path / "s", chunks, num_slots, "threads") as store:
        assert store.stats()["dram"]["slots_touched"] == num_slots


def test_twins_share_their_files_and_nothing_else(tmp_path: Path) -> None:
    chunks, roots = Chunks.of_size(SMALL, 0), [tmp_path / "a", tmp_path / "b"]
    keys = chunks.chain("x", 3)
    fill(roots[0], chunks, keys)
    twin(*roots)
    first, second = (files_of(root, keys) for root in roots)
    assert all(os.path.samefile(a, b) for a, b in zip(first, second, strict=True))
    one, other = (
        {p.stat().st_ino for p in root.rglob("*") if p.is_file() and p.suffix != ".kv"}
        for root in roots
    )
    assert not one & other


def test_engines_work_until_a_load_is_ready_and_not_after(tmp_path: Path) -> None:
    chunks = Chunks.of_size(SMALL, 0)
    keys = chunks.chain("x", 2)
    fill(tmp_path / "s", chunks, keys)
    with open_in_place(tmp_path / "s", chunks, 2, "threads") as store:
        for step in ENGINES.values():
            load = store.prepare_load(keys)
            assert run_until_ready(store, load, step) > 0
            assert load.state is LoadState.READY
            store.complete_load(load)
            again = store.prepare_load(chunks.chain("absent", 1))
            assert run_until_ready(store, again, step) == 0
            store.complete_load(again)


def test_what_a_store_cannot_hold_is_an_error_and_not_a_fast_load(tmp_path: Path) -> None:
    chunks = Chunks.of_size(SMALL, 0)
    config = StoreConfig(dram_bytes=2 * SMALL, admission=Always)
    with (
        TieredStore(config, chunks.namespace) as store,
        pytest.raises(OSError, match="took 2 of 3 chunks: dram is full"),
    ):
        chunks.put(store, chunks.chain("x", 3))


def test_ratios_compare_a_hit_with_the_reads_beside_it() -> None:
    hits = [
        Samples([2.0, 2.0], 8, steps=10, raw_s=[1.0, 1.0]),
        Samples([40.0], 8, steps=4, raw_s=[30.0]),
        Samples([4.0], 8, steps=2, raw_s=[1.0]),
    ]
    alone = [Samples([1.0], steps=5), Samples([1.0], steps=1), Samples([1.0], steps=1)]
    taken = {
        MEMCPY: [Samples([0.5], 8), Samples([0.5], 8), Samples([0.5], 8)],
        What("engine alone", "process", "python"): alone,
        What(NVME, "process", "python"): hits,
    }
    rows = {row["measured"]: row for row in rows_of(taken, 4, 1)}
    hit = rows[NVME]
    assert hit["to_raw"] == 0.5  # of 0.5, 0.75, 0.25
    assert hit["to_memcpy"] == 0.125  # of 0.125, 0.0125, 0.125
    assert hit["engine_keeps"] == 0.5  # of 0.5, 0.1, 0.5
    assert hit["p50"] == pytest.approx(2e6)
    assert rows[RAW.name]["count"] == 4
    assert "engine alone" not in rows
