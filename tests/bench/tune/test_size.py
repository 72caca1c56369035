import json
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

from rootcellar.bench.tune import size

GIB = 1 << 30


def shown(result: dict[str, Any]) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(size.table(result))
    return captured.get()


def test_the_result_is_json_and_adds_up() -> None:
    result = json.loads(json.dumps(size.run("llama-3.1-8b"), allow_nan=False))
    kv, hbm = result["kv"], result["hbm"]
    assert kv["bytes_per_token"] == 128 * 1024
    assert kv["chunk_bytes"] == 32 << 20
    assert kv["tokens_per_gib"] == 8192
    spent = hbm["weight_bytes"] + hbm["reserve_bytes"] + hbm["batch_bytes"]
    assert spent + hbm["left_bytes"] == hbm["total_bytes"] == 80 * GIB
    assert hbm["batch_bytes"] == 32 * GIB
    assert hbm["cache_tokens"] == hbm["left_bytes"] // kv["bytes_per_token"]
    assert result["tiers"]["dram"] == {"bytes": 64 * GIB, "chunks": 2048, "tokens": 524_288}
    assert result["tiers"]["nvme"]["tokens"] == 8_388_608


def test_a_batch_that_does_not_fit_says_what_would() -> None:
    result = size.run("llama-3.1-8b", concurrency=100)
    hbm = result["hbm"]
    assert not hbm["fits"]
    assert hbm["cache_tokens"] == 0
    assert size.run("llama-3.1-8b", concurrency=hbm["most_concurrency"])["hbm"]["fits"]
    assert not size.run("llama-3.1-8b", concurrency=hbm["most_concurrency"] + 1)["hbm"]["fits"]
    text = shown(result)
    assert "= missing" in text
    assert f"HBM holds {hbm['most_concurrency']} sequences of 8,192 tokens at most" in text


def test_weights_larger_than_hbm_leave_room_for_nobody() -> None:
    hbm = size.run("llama-3.1-405b")["hbm"]
    assert (hbm["fits"], hbm["most_concurrency"]) == (False, 0)


def test_a_tier_is_counted_in_whole_chunks() -> None:
    tiers = size.run("llama-3.1-8b", dram=(64 << 20) - 1, nvme="100MB")["tiers"]
    assert [tier["tokens"] for tier in tiers.values()] == [256, 512]


def test_kv_on_several_gpus_takes_its_room_on_each() -> None:
    one = size.run("deepseek-v3", gpus=16)["hbm"]
    assert one["copies"] == 16
    assert one["batch_bytes"] == 16 * 32 * 8192 * 70_272
    assert one["cache_tokens"] == one["left_bytes"] // (16 * 70_272)


@pytest.mark.parametrize(
    ("model", "texts"),
    [
        ("gemma-3-27b", ["496.0 KiB", "past the window", "80.0 KiB", "reserve, 10%"]),
        ("qwen3-next-80b-a3b", ["State of a sequence", "37.7 MiB", "Chunks hold no state"]),
        ("deepseek-v3", ["68.6 KiB", "embedding: 2"]),
    ],
)
def test_the_table_says_what_is_special_about_a_model(model: str, texts: list[str]) -> None:
    text = shown(size.run(model))
    assert all(part in text for part in texts)
    assert "past the window" not in shown(size.run("llama-3.1-8b"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"gpus": 0}, "gpus is 0"),
        ({"gpu_gb": float("nan")}, "gpu_gb is nan"),
        ({"context": -1}, "context is -1"),
        ({"dram": "64 gigs"}, "dram is '64 gigs'"),
        ({"kv_dtype": "int2"}, "kv_dtype is 'int2'"),
    ],
)
def test_a_wrong_argument_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        size.run("llama-3.1-8b", **wrong)


def test_sizing_needs_neither_torch_nor_numba() -> None:
    """A command that only multiplies must not make its user wait."""
    code = (
        "import sys; from rootcellar.bench.tune import size; size.run('llama-3.1-8b');"
        "assert not {'torch', 'numba'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
