"""From trace files to the document of `rootcellar tune`, and to its page."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootcellar.admission.always import Always
from rootcellar.bench.tune import ask
from rootcellar.bench.tune.budget import Budget
from rootcellar.bench.tune.cells import BINS, timeline
from rootcellar.bench.tune.contenders import Task, contender
from rootcellar.bench.tune.counts import TierCounts
from rootcellar.bench.tune.device import Device
from rootcellar.bench.tune.lru import Counts, replay_lru
from rootcellar.bench.tune.models import kv_shape
from rootcellar.bench.tune.optimal import replay_optimal
from rootcellar.bench.tune.replay import Replay
from rootcellar.bench.tune.sizes import SWEEP, Sizes
from rootcellar.bench.tune.trace import Trace

CELL_KEYS = [
    "trace",
    "seed",
    "policy",
    "dram_share",
    "nvme_share",
    "refs",
    "distinct",
    "prefix_hit",
    "prefix_hit_last_half",
    "plain_hit",
    "hits_by_tier",
    "nvme_chunk_writes",
    "chunk_writes",
    "seconds",
]
"""What scripts read."""

MODEL = "llama-3.1-8b"


def ignore(done: int, total: int) -> None:
    """Nobody looks at the progress."""


def write_mooncake(path: Path, num_requests: int = 120, seed: int = 0) -> Path:
    """Conversations that grow, one request a minute."""
    rng, blocks = random.Random(seed), iter(range(1, 1 << 20))
    chats: list[list[int]] = []
    with path.open("w") as file:
        for minute in range(num_requests):
            if not chats or rng.random() < 0.4:
                chats.append([0])
            chat = rng.choice(chats[-6:])
            chat += [next(blocks) for _ in range(rng.randint(1, 4))]
            record = {
                "timestamp": 60_000 * minute,
                "input_length": 512 * len(chat) - 100,
                "output_length": 50,
                "hash_ids": chat,
            }
            file.write(json.dumps(record) + "\n")
    return path


def write_sessions(path: Path) -> Path:
    """Agents that do not say when they began."""
    with path.open("w") as file:
        for _ in range(8):
            requests = [
                {
                    "t": 30.0 * turn,
                    "in": 256 * (turn + 2),
                    "out": 10,
                    "hash_runs": [1, 4 * turn + 8],
                }
                for turn in range(4)
            ]
            session = {"block_size": 64, "tool_tokens": 0, "system_tokens": 0}
            file.write(json.dumps(session | {"requests": requests}) + "\n")
    return path


def tune(*traces: Path, **options: Any) -> dict[str, Any]:
    options.setdefault("policies", ["lru", "opt"])
    return ask.run(traces, model=MODEL, command=["rootcellar", "tune"], progress=ignore, **options)


def find(document: dict[str, Any], **wanted: object) -> dict[str, Any]:
    (cell,) = [c for c in document["cells"] if all(c[k] == v for k, v in wanted.items())]
    found: dict[str, Any] = cell
    return found


# The document


def test_a_cell_has_what_scripts_read_and_the_document_is_json(tmp_path: Path) -> None:
    document = tune(write_mooncake(tmp_path / "chat.jsonl"), shares=[0.1], nvme_shares=[0.2])
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    for cell in document["cells"]:
        assert set(CELL_KEYS) <= set(cell)
        assert cell["plain_hit"] >= cell["prefix_hit"]
        assert cell["prefix_hit"] == pytest.approx(sum(cell["hits_by_tier"].values()))
        assert cell["hole_loss"] == pytest.approx(cell["plain_hit"] - cell["prefix_hit"])
        assert cell["prefill_s_saved"] <= cell["prefill_s_total"]
        assert cell["ttft_p95_s"] <= cell["ttft_p95_no_cache_s"]
    assert [trace["trace"] for trace in document["traces"]] == ["chat.jsonl"]
    assert document["advice"]


def test_one_tier_is_held_against_exact_lru_and_the_optimal_policy(tmp_path: Path) -> None:
    path = write_mooncake(tmp_path / "chat.jsonl")
    document = tune(path, shares=[0.1], policies=["lru", "opt", "gated"])
    lru, optimal, gated = (find(document, policy=p) for p in ("lru", "opt", "gated"))
    assert lru["gap_closed"] == 0
    assert optimal["gap_closed"] == 1
    assert optimal["regret"] == 0
    gap = optimal["prefix_hit"] - lru["prefix_hit"]
    assert gated["gap_closed"] == pytest.approx((gated["prefix_hit"] - lru["prefix_hit"]) / gap)
    assert gated["regret"] == pytest.approx(optimal["prefix_hit"] - gated["prefix_hit"])
    assert lru["nvme_share"] is None
    assert lru["nvme_dwpd"] is None
    assert lru["nvme_chunk_writes"] == 0 < lru["chunk_writes"]


def test_nvme_below_dram_adds_hits_and_wears_the_drive(tmp_path: Path) -> None:
    path = write_mooncake(tmp_path / "chat.jsonl")
    document = tune(path, shares=[0.05], nvme_shares=[0.3])
    lru, optimal = find(document, policy="lru"), find(document, policy="opt")
    assert lru["hits_by_tier"]["nvme"] > 0
    assert lru["prefix_hit"] <= optimal["prefix_hit"]
    assert lru["nvme_share"] == 0.3
    assert lru["nvme_chunks"] == round(0.3 * lru["distinct"])
    written_bytes = lru["nvme_chunk_writes"] * 512 * 131072
    seconds = 3600 * document["traces"][0]["hours"]
    assert lru["nvme_tb_per_day"] == pytest.approx(written_bytes / 1e12 * 86400 / seconds)
    assert lru["nvme_dwpd"] == pytest.approx(lru["nvme_tb_per_day"] * 1.1 / 7.68)
    hits = lru["hits_by_tier"]["nvme"] * lru["refs"]
    assert lru["nvme_bytes_per_hit_byte"] == pytest.approx(lru["nvme_chunk_writes"] / hits)
    assert optimal["nvme_chunk_writes"] == optimal["chunk_writes"]


def test_shares_and_sizes_make_a_grid_and_nothing_makes_the_sweep(tmp_path: Path) -> None:
    path = write_mooncake(tmp_path / "chat.jsonl")
    document = tune(path, shares=[0.1, 0.2], nvme_shares=[0.3, 0.4], policies=["opt"])
    grid = [(cell["dram_share"], cell["nvme_share"]) for cell in document["cells"]]
    assert grid == [(0.1, 0.3), (0.1, 0.4), (0.2, 0.3), (0.2, 0.4)]
    document = tune(path, policies=["lru"])
    assert [cell["dram_share"] for cell in document["cells"]] == list(SWEEP)
    document = tune(path, policies=["lru"], hbm="1GiB", dram="1GiB", nvme="1GiB")
    (cell,) = document["cells"]
    assert (cell["dram_chunks"], cell["nvme_chunks"]) == (32, 16)
    assert (cell["dram_bytes"], cell["nvme_bytes"]) == (2 << 30, 1 << 30)
    assert document["budget"] == {"dram_bytes": 2 << 30, "nvme_bytes": 1 << 30}


def test_seeds_are_run_only_where_they_change_when_requests_arrive(tmp_path: Path) -> None:
    chat, agents = write_mooncake(tmp_path / "chat"), write_sessions(tmp_path / "agents")
    document = tune(chat, agents, shares=[0.5], seeds=3)
    seeds = [(cell["trace"], cell["seed"]) for cell in document["cells"] if cell["policy"] == "lru"]
    assert seeds == [("chat", 0), ("agents", 0), ("agents", 1), ("agents", 2)]
    assert [trace["trace"] for trace in document["traces"]] == ["chat", "agents"]
    assert {(knee["trace"], knee["seed"]) for knee in document["knees"]} == set(seeds)


def test_curves_lie_between_nothing_and_what_an_endless_cache_hits(tmp_path: Path) -> None:
    path = write_mooncake(tmp_path / "chat.jsonl", 400)
    document = tune(path, shares=[0.1])
    lru, optimal = document["curves"]
    infinite = document["traces"][0]["infinite_hit"]
    for curve in (lru, optimal):
        assert curve["chunks"] == sorted(set(curve["chunks"]))
        assert curve["hit"] == sorted(curve["hit"])
        assert curve["hit"][-1] == pytest.approx(infinite)
        assert len(curve["chunks"]) <= 200
    exact = find(document, policy="opt")
    assert dict(zip(optimal["chunks"], optimal["hit"], strict=True))[exact["dram_chunks"]] == (
        pytest.approx(exact["prefix_hit"])
    )
    (knee,) = document["knees"]
    at_knee = dict(zip(lru["chunks"], lru["hit"], strict=True))[knee["chunks"]]
    assert at_knee >= 0.95 * infinite
    assert knee["bytes"] == knee["tokens"] * 131072 == knee["chunks"] * 512 * 131072


def test_progress_never_falls_and_ends_at_its_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    ask.run(
        [write_mooncake(tmp_path / "chat.jsonl")],
        model=MODEL,
        shares=[0.1],
        nvme_shares=[0.2],
        policies=["lru", "opt"],
        command=[],
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]
    assert len({total for _, total in seen}) == 1


def test_the_page_is_written_whole_and_nothing_else_stays(tmp_path: Path) -> None:
    path, out = write_mooncake(tmp_path / "chat.jsonl"), tmp_path / "page" / "report.html"
    out.parent.mkdir()
    document = tune(path, shares=[0.1], out=out)
    assert list(out.parent.iterdir()) == [out]
    assert document["advice"].split()[0] in out.read_text()


# Who takes part


@pytest.mark.parametrize(("name", "bound"), [("lru", replay_lru), ("opt", replay_optimal)])
def test_the_bounds_of_one_tier_are_the_exact_ones(
    name: str, bound: Callable[[Trace, int], Counts]
) -> None:
    trace = _trace([[0, 1, 2], [0, 3], [4], [0, 1, 2]])
    counts = contender(name)(Task(trace=trace, dram_chunks=3, nvme_chunks=0), ignore)
    exact = bound(trace, 3)
    assert counts.hits.tolist() == exact.hits.tolist()
    assert counts.chunk_writes == exact.chunk_writes


def test_a_policy_is_counted_as_the_replay_counts_it() -> None:
    chains = [[0, 1, 2], [0, 3], [4], [0, 1, 2], [5, 6], [4], [0, 3]]
    trace = _trace(chains)
    counts = contender("lru")(Task(trace=trace, dram_chunks=4, nvme_chunks=5), ignore)
    replay = Replay(Always(), 4, 5)
    found = [replay.request([bytes([n]) for n in chain], 0.0) for chain in chains]
    assert counts.dram_hits.tolist() == [outcome.dram for outcome in found]
    assert counts.nvme_hits.tolist() == [outcome.nvme for outcome in found]
    assert counts.nvme_hits.any()
    assert counts.plain_hits == sum(outcome.plain for outcome in found)
    assert counts.chunk_writes == replay.chunk_writes
    assert counts.nvme_chunk_writes == replay.nvme_chunk_writes
    assert (counts.promotions, counts.wasted_promotions) == (
        replay.promotions,
        replay.wasted_promotions,
    )


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(0, 10_000))
def test_a_timeline_holds_every_hit_once(lengths: list[int], duration_s: int) -> None:
    times_s = np.linspace(0, duration_s, len(lengths))
    ids = np.arange(sum(lengths), dtype=np.int32)
    trace = _trace([], times_s=times_s, ids=ids, lengths=lengths)
    hits = np.array([length // 2 for length in lengths], np.int32)
    zeros = np.zeros_like(hits)
    counts = TierCounts(dram_hits=hits, nvme_hits=zeros, plain_hits=0, chunk_writes=0)
    bins = timeline(trace, counts)
    assert len(bins) <= BINS
    hours = [entry["hour"] for entry in bins]
    assert hours == sorted(set(hours))
    assert all(0 <= entry["dram"] <= 1 and entry["nvme"] == 0 for entry in bins)


# What cannot be done


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shares": [1.5]}, "--share is 1.5"),
        ({"shares": [0.0]}, "--share is 0"),
        ({"shares": [0.1], "nvme_shares": [-1.0]}, "--nvme-share is -1"),
        ({"nvme_shares": [0.1]}, "give both"),
        ({"nvme": "1TiB"}, "give both"),
        ({"dram": "many"}, "--dram is 'many'"),
        ({"policies": ["belady"]}, "must be one of .*gated.*opt"),
        ({"seeds": 0}, "--seeds is 0"),
        ({"write_budget": "lots"}, "--write-budget is 'lots'"),
        ({"write_budget": "-1DWPD"}, "--write-budget"),
        ({"device": ["nvme_tb"]}, "must be field=value"),
        ({"device": ["speed=3"]}, "speed"),
        ({"out": Path("/nowhere/report.html")}, "is no directory"),
        ({"dram": "1MiB"}, "must hold a chunk"),
    ],
)
def test_a_wrong_argument_is_named(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = write_mooncake(tmp_path / "chat.jsonl", 3)
    with pytest.raises(ValueError, match=said):
        tune(path, **options)


def test_a_missing_trace_is_found_before_any_work(tmp_path: Path) -> None:
    path = write_mooncake(tmp_path / "chat.jsonl", 3)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        tune(path, tmp_path / "nowhere")
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="one name"):
        tune(path, write_mooncake(tmp_path / "other" / "chat.jsonl", 3))


def test_a_write_budget_is_per_reference_or_of_the_drives() -> None:
    trace = _trace([[0, 1], [0, 1]], times_s=np.array([0.0, 86_400.0]))
    model, device = kv_shape(MODEL), Device(nvme_tb=1.0, write_amplification=1.0)
    assert Budget.parse("0.15").of(trace, model, device) == 0.15
    chunk_bytes = model.chunk_bytes(trace.chunk_tokens)
    allowed = Budget.parse("2dwpd").of(trace, model, device)
    assert allowed == pytest.approx(2e12 / chunk_bytes / trace.refs)
    assert Budget().of(trace, model, device) is None
    at_once = _trace([[0], [0]], times_s=np.zeros(2))
    with pytest.raises(ValueError, match="no duration"):
        Budget.parse("1DWPD").of(at_once, model, device)


def test_sizes_are_each_replayed_once() -> None:
    trace = _trace([list(range(10))])
    chunk_bytes = 1000
    sizes = Sizes(shares=[0.1, 0.11, 0.1], dram_bytes=5000)
    chunks = [capacity.dram_chunks for capacity in sizes.of(trace, chunk_bytes)]
    assert chunks == [1, 1, 5]


def _trace(
    chains: list[list[int]],
    *,
    times_s: Any = None,
    ids: Any = None,
    lengths: list[int] | None = None,
) -> Trace:
    sizes = lengths or [len(chain) for chain in chains]
    flat = [chunk for chain in chains for chunk in chain]
    return Trace(
        name="made up",
        ids=np.array(flat, np.int32) if ids is None else ids,
        offsets=np.cumsum([0, *sizes], dtype=np.int64),
        times_s=np.arange(len(sizes), dtype=np.float64) if times_s is None else times_s,
        input_tokens=np.full(len(sizes), 512, np.int64),
        output_tokens=np.zeros(len(sizes), np.int64),
        chunk_tokens=256,
    )


def test_a_page_replaces_files_only_and_goes_where_a_link_leads(tmp_path: Path) -> None:
    trace = write_mooncake(tmp_path / "chat.jsonl", 8)
    pipe, link, real = tmp_path / "pipe", tmp_path / "link.html", tmp_path / "real.html"
    os.mkfifo(pipe)
    link.symlink_to(real)

    def tune(out: Path) -> None:
        ask.run([trace], model=MODEL, policies=["lru"], out=out, command=["tune"], progress=ignore)

    for there in (pipe, tmp_path):
        with pytest.raises(ValueError, match="must be a file or not be there yet"):
            tune(there)
    with pytest.raises(ValueError, match="is no directory"):
        tune(tmp_path / "nowhere" / "page.html")
    assert pipe.is_fifo()
    tune(link)
    assert link.is_symlink()
    assert real.read_text().lower().startswith("<!doctype html>")


@pytest.mark.parametrize("seeds", [0, 1_000_000_000])
def test_a_number_of_seeds_that_nobody_can_wait_for_is_refused(tmp_path: Path, seeds: int) -> None:
    trace = write_mooncake(tmp_path / "chat.jsonl", 8)
    with pytest.raises(ValueError, match=f"--seeds is {seeds}, must be from 1 to 1000"):
        ask.run([trace], model=MODEL, seeds=seeds, command=["tune"], progress=ignore)
