"""`rootcellar bench vllm-scheduler` measures what it says, on a small prompt."""

from typing import Any

import pytest

from rootcellar.bench import vllm_scheduler


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = vllm_scheduler.run(rounds=1, prompt_tokens=1024)["rows"]
    return rows


def test_each_block_size_has_a_miss_and_a_hit(rows: list[dict[str, Any]]) -> None:
    assert [(row["block_tokens"], row["outcome"]) for row in rows] == [
        (block_size, outcome)
        for block_size in vllm_scheduler.BLOCK_SIZES
        for outcome in ("miss", "hit")
    ]


def test_a_miss_stores_and_a_hit_loads(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["hashing_us"] > 0
        assert row["lookup_us"] > 0
        assert (row["store_us"] > 0, row["load_us"] > 0) == (
            row["outcome"] == "miss",
            row["outcome"] == "hit",
        )
        ours = row["lookup_us"] + row["load_us"] + row["store_us"]
        assert row["share"] == pytest.approx(ours / row["hashing_us"])
