"""Documents of `rootcellar tune` as tests want them: made by hand, and at random with holes."""

import math
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st

Document = dict[str, Any]

GIB = 1 << 30
CHUNK_BYTES = 131_072 * 512
NUMBERS = (
    "prefix_hit_last_half",
    "plain_hit",
    "nvme_chunk_writes",
    "chunk_writes",
    "hole_loss",
    "regret",
    "gap_closed",
    "nvme_bytes_per_hit_byte",
    "nvme_tb_per_day",
    "nvme_dwpd",
    "promotions",
    "wasted_promotions",
    "prefill_s_saved",
    "prefill_s_total",
    "ttft_p50_s",
    "ttft_p95_s",
    "ttft_p50_no_cache_s",
    "ttft_p95_no_cache_s",
)


def cell(
    policy: str = "default",
    dram_gib: float = 64,
    nvme_gib: float = 0,
    hit: float = 0.3,
    trace: str = "day.jsonl",
    seed: int = 0,
    **others: Any,
) -> Document:
    """What is not named is what a replay without much to say would give."""
    bins = [{"hour": n / 4, "dram": hit / 2, "nvme": hit / 2 if nvme_gib else 0} for n in range(20)]
    return {
        "trace": trace,
        "seed": seed,
        "policy": policy,
        "dram_share": 0.1,
        "nvme_share": 0.2 if nvme_gib else None,
        "refs": 200_000,
        "distinct": 100_000,
        "prefix_hit": hit,
        "hits_by_tier": {"dram": hit / 2, "nvme": hit / 2},
        "dram_bytes": int(dram_gib * GIB),
        "nvme_bytes": int(nvme_gib * GIB),
        "refusals": {"never seen": 30, "too short": 10},
        "timeline": bins,
        **dict.fromkeys(NUMBERS),
        "nvme_chunk_writes": 50_000 if nvme_gib else 0,
        **others,
    }


def document(cells: Sequence[Document], infinite: float | None = 0.4, **others: Any) -> Document:
    """One that has everything but budget, curves and knees, which may be among `others`."""
    names = list(dict.fromkeys(cell["trace"] for cell in cells))
    facts: Document = {"requests": 9000, "refs": 200_000, "distinct": 100_000, "chunk_tokens": 512}
    facts |= {"hours": 5.0, "input_tokens": 100_000_000, "infinite_hit": infinite}
    notes = ["Blocks are of 512 tokens."]
    return {
        "rootcellar": "1.2.3",
        "command": "rootcellar tune day.jsonl",
        "made_at": "2026-11-29T12:00:00+00:00",
        "model": {"name": "llama", "kv_bytes_per_token": 131_072, "chunk_bytes": CHUNK_BYTES // 2},
        "device": {"link_gb_s": 50.0, "drive_tb": 7.68, "drive_dwpd": 1.0, "nvme_drives": 1},
        "traces": [{"trace": name, **facts, "notes": notes} for name in names],
        "cells": list(cells),
        "curves": [],
        "knees": [],
        **others,
    }


def curve(policy: str, reach: float, trace: str = "day.jsonl", seed: int = 0) -> Document:
    """Rises to 0.4; the smaller `reach` (chunks), the sooner."""
    chunks = sorted({round(1.2**n) for n in range(64)})
    hits = [0.4 * (1 - math.exp(-count / reach)) for count in chunks]
    return {"trace": trace, "seed": seed, "policy": policy, "chunks": chunks, "hit": hits}


def knee(num_bytes: float, trace: str = "day.jsonl", seed: int = 0) -> Document:
    found = {"chunks": num_bytes // CHUNK_BYTES, "bytes": num_bytes, "tokens": num_bytes / 131_072}
    return {"trace": trace, "seed": seed, "hit_share": 0.95, "slope_past": 0.012, **found}


def whole(seeds: int = 1, trace: str = "day.jsonl") -> Document:
    """Both curves, knee, budget, and three policies at three sizes of one and of two tiers."""
    cells = [
        cell(
            policy, dram, nvme, better * share, trace, seed,
            nvme_tb_per_day=12.0 if nvme else None, nvme_dwpd=1.6 if nvme else None,
            ttft_p50_s=0.2, ttft_p95_s=1.9, ttft_p50_no_cache_s=0.4, ttft_p95_no_cache_s=4.2,
            prefill_s_saved=100.0, prefill_s_total=400.0,
        )
        for seed in range(seeds)
        for policy, better in (("default", 1.0 + seed / 50), ("gated", 0.9), ("lru", 0.8))
        for dram, nvme, share in ((16, 0, 0.1), (64, 0, 0.2), (64, 1024, 0.35))
    ]  # fmt: skip
    curves = [
        curve(policy, reach, trace, seed)
        for seed in range(seeds)
        for policy, reach in (("lru", 4000 + 100 * seed), ("optimal", 1000))
    ]
    knees = [knee(800 * GIB, trace, seed) for seed in range(seeds)]
    budget = {"dram_bytes": 64 * GIB, "nvme_bytes": None}
    return document(cells, curves=curves, knees=knees, budget=budget)


_fractions = st.floats(0, 1, allow_subnormal=False)
_numbers = st.one_of(st.none(), st.floats(0, 1e9, allow_subnormal=False))
_names = st.text(min_size=1, max_size=12) | st.just("</title><script>&\"'")


@st.composite
def documents(draw: st.DrawFn) -> Document:
    """Any names, sizes and hits; any number may be unknown."""
    names = draw(st.lists(_names, min_size=1, max_size=2, unique=True))
    one_cell = st.builds(
        cell,
        policy=st.sampled_from(["default", "lru", "gated", "opt"]) | _names,
        dram_gib=st.sampled_from([0.5, 3, 8, 64, 500]),
        nvme_gib=st.sampled_from([0, 0, 20, 1024]),
        hit=_fractions,
        trace=st.sampled_from(names),
        seed=st.integers(0, 2),
        hits_by_tier=st.none() | st.fixed_dictionaries({"dram": _fractions, "nvme": _fractions}),
        refusals=st.none() | st.dictionaries(_names, st.integers(0, 10**6), max_size=2),
        timeline=st.none() | st.just([]) | st.just([{"hour": 0, "dram": 0.1, "nvme": None}] * 3),
        **{name: _numbers for name in NUMBERS},
    )
    cells = draw(st.lists(one_cell, max_size=8))
    curves = [
        curve(policy, draw(st.sampled_from([1.0, 50.0, 4000.0])), name)
        for name in names
        for policy in draw(st.sets(st.sampled_from(["lru", "optimal"])))
    ]
    knees = [knee(draw(st.floats(1e9, 1e13)), name) for name in names if draw(st.booleans())]
    made = document(cells, draw(st.none() | _fractions), curves=curves, knees=knees)
    made["budget"] = draw(st.none() | st.just({"dram_bytes": GIB, "nvme_bytes": None}))
    for part in draw(st.sets(st.sampled_from(["model", "device", "traces", "knees", "made_at"]))):
        made[part] = None
    return made
