"""The demo serves from every tier, tells the truth about it, and survives a restart."""

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rootcellar.bench.demo import run
from rootcellar.bench.demo_model import load_model
from rootcellar.bench.demo_report import Row, report_of, rows_table, succeeded, summary_table
from rootcellar.bench.demo_restart import ask_again
from rootcellar.bench.demo_serving import Answer
from rootcellar.bench.demo_view import run_live
from rootcellar.bench.demo_workload import MAX_REQUESTS, file_workload, shipped_workload
from rootcellar.connector.served import Served

TRACES = Path(__file__).parents[3] / "shared" / "traces" / "agent-text"


def _bytes(text: str) -> list[int]:
    return list(text.encode())


def _write(path: Path, *inputs: Any) -> Path:
    path.write_text("".join(json.dumps({"input": text}) + "\n" for text in inputs))
    return path


def _row(**values: Any) -> Row:
    settings: dict[str, Any] = {"label": "x", "hbm": 0, "dram": 0, "nvme": 0, "computed": 0}
    settings |= {"uncached_ms": 100.0, "cached_ms": 50.0, "identical": True}
    return Row(**(settings | values))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model on disk, with a tokenizer that makes a token of every byte."""
    path = tmp_path_factory.mktemp("model")
    letters = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast: Any = PreTrainedTokenizerFast  # its constructor has no annotations
    fast(tokenizer_object=tokenizer).save_pretrained(path)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


def test_every_tier_serves_and_the_restarted_store_too(model_path: str, tmp_path: Path) -> None:
    stories = [f"Story {n}. " + f"Crate {n * n} stands by the door. " * 20 for n in range(8)]
    returning = [stories[0], stories[0] + " And then?", stories[1], stories[0]]
    asked = [*returning, *stories[2:], *stories]
    rows: list[Row] = []
    report = run(
        model=model_path,
        sessions=_write(tmp_path / "prompts.jsonl", *asked),
        store=tmp_path / "store",
        on_row=rows.append,
    )
    assert succeeded(report)
    assert report["requests"] == len(rows) == len(asked)
    assert min(report["tokens"].values()) > 0, report["tokens"]
    assert sum(report["tokens"].values()) == sum(map(len, asked))
    assert report["restart"]["nvme_tokens"] > 0
    assert report["notes"] == []
    json.dumps(report, allow_nan=False)


def test_the_demo_is_shown_on_a_console(tmp_path: Path) -> None:
    console = Console(record=True, width=120)
    report = run_live(console, sessions=_write(tmp_path / "prompts.jsonl", "Good morning.", ""))
    shown = console.export_text()
    assert succeeded(report)
    assert "prompt 1" in shown
    assert "every output token is the same" in shown
    assert "note: 1 of 2 inputs are empty and were skipped" in shown


def test_a_store_that_cannot_be_opened_is_an_error(model_path: str, tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    prompts = _write(tmp_path / "prompts.jsonl", "Good morning.")
    with pytest.raises((OSError, ValueError)):
        run(model=model_path, sessions=prompts, store=tmp_path / "store")


def test_the_shipped_conversations_share_their_system_prompt_and_fit_the_model() -> None:
    workload = shipped_workload(_bytes)
    firsts = [turn for turn in workload.turns if turn.label.endswith(" 1")]
    assert len(firsts) == 6
    assert len({tuple(turn.tokens[:600]) for turn in firsts}) == 1
    assert len({turn.label for turn in workload.turns}) == 24
    longest = max(
        sum(len(t.tokens) for t in workload.turns if t.conversation == first.conversation)
        for first in firsts
    )
    assert 2000 < longest == workload.longest_prompt() < load_model(None).max_prompt_tokens


def test_distinct_tokens_count_shared_prefixes_once() -> None:
    workload = shipped_workload(_bytes)
    firsts = {turn.conversation: turn.tokens for turn in workload.turns if "1" in turn.label}
    assert workload.distinct_tokens(10_000) == 0
    chunks = {tuple(tokens[:256]) for tokens in firsts.values()}
    assert len(chunks) == 1
    every_token_alone = sum(len(turn.tokens) for turn in workload.turns)
    shared = (len(firsts) - 1) * (905 // 256) * 256
    assert 0 <= every_token_alone - shared - workload.distinct_tokens(256) < 256 * 6


def test_equal_seeds_make_equal_models() -> None:
    one, other = load_model(None).model.state_dict(), load_model(None).model.state_dict()
    assert all(one[name].equal(other[name]) for name in one)


def test_inputs_may_be_text_messages_or_parts(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "One"}, {"text": "Two"}]},
        {"role": "assistant", "content": None},
    ]
    path = _write(tmp_path / "prompts.jsonl", "plain", messages)
    texts = [bytes(turn.tokens).decode() for turn in file_workload(path, _bytes, 1000).turns]
    assert texts == ["plain", "system: Be brief.\n\nuser: One\n\nTwo\n\nassistant: "]


def test_what_is_left_out_of_a_file_is_said(tmp_path: Path) -> None:
    path = _write(tmp_path / "prompts.jsonl", "", *["word " * 10] * (MAX_REQUESTS + 2))
    workload = file_workload(path, _bytes, 20)
    assert {len(turn.tokens) for turn in workload.turns} == {20}
    assert workload.notes == [
        f"1 of {MAX_REQUESTS + 3} inputs are empty and were skipped",
        f"only the first {MAX_REQUESTS} of {MAX_REQUESTS + 2} prompts were taken",
        f"{MAX_REQUESTS} of {MAX_REQUESTS} prompts were cut to their first 20 tokens",
    ]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("no json", "line 2: must be"),
        ('{"output": "x"}', "line 2: must be"),
        ('{"input": 5}', "line 2: must be"),
        ('["input"]', "line 2: must be"),
        ('{"input": [{"image": "x"}]}', "line 2: must be"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str, why: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"input": "fine"}}\n{line}\n')
    with pytest.raises(ValueError, match=why):
        file_workload(path, _bytes, 100)


def test_a_file_without_a_prompt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no prompt"):
        file_workload(_write(tmp_path / "prompts.jsonl", "", ""), _bytes, 100)


@pytest.mark.skipif(not TRACES.exists(), reason="the agent traces are not here")
def test_real_agent_sessions_are_read(tmp_path: Path) -> None:
    with tarfile.open(TRACES / "sessions.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    for path in sorted(tmp_path.rglob("*.jsonl")):
        workload = file_workload(path, _bytes, 4096)
        assert 1 <= len(workload.turns) <= MAX_REQUESTS
        assert all(1 <= len(turn.tokens) <= 4096 for turn in workload.turns)


def test_a_request_counts_for_the_source_of_most_of_its_prompt() -> None:
    assert _row(hbm=10, nvme=30, computed=20).source == "nvme"
    assert _row(hbm=10, computed=20).source == "computed"
    rows = [_row(hbm=9, cached_ms=10.0), _row(hbm=9, cached_ms=30.0), _row(dram=5, computed=9)]
    report = report_of(rows, {"nvme_tokens": 0, "outputs_identical": True})
    assert report["ttft_ms"] == {
        "uncached_p50": 100.0,
        "hbm_p50": 20.0,
        "dram_p50": None,
        "nvme_p50": None,
        "computed_p50": 50.0,
    }
    assert report["tokens"] == {"hbm": 18, "dram": 5, "nvme": 0, "computed": 9}


def test_one_different_token_anywhere_is_a_failure() -> None:
    same = {"nvme_tokens": 1, "outputs_identical": True}
    assert succeeded(report_of([_row()], same))
    assert not succeeded(report_of([_row(), _row(identical=False)], same))
    assert not succeeded(report_of([_row()], same | {"outputs_identical": False}))


def test_a_reply_of_other_tokens_is_not_the_same() -> None:
    served = Served(hbm=1, dram=0, nvme=0, computed=2, ttft_s=0.1)
    answers = [Answer(reply=reply, ttft_s=0.1) for reply in ([1, 2], [1, 2], [1, 3])]
    assert Row.of("same", answers[0], answers[1], served).identical
    assert not Row.of("other", answers[0], answers[2], served).identical


def test_the_new_process_notices_another_reply(model_path: str, tmp_path: Path) -> None:
    budgets = {"hbm_tokens": 512, "dram_bytes": 1 << 20, "nvme_bytes": 1 << 24}
    spec: dict[str, Any] = {"model": model_path, "store": str(tmp_path), "budgets": budgets}
    exchange: dict[str, list[int]] = {"prompt": [1, 2, 3], "reply": []}
    found = ask_again(spec | {"exchanges": [exchange]})
    assert not found["outputs_identical"]
    assert found["computed_tokens"] == 3


def test_a_difference_is_shown() -> None:
    console = Console(record=True, width=120)
    rows = [_row(hbm=3), _row(identical=False, nvme=4)]
    report = report_of(rows, {"nvme_tokens": 1, "outputs_identical": True}) | {"model": "tiny"}
    console.print(rows_table(rows), summary_table(report))
    shown = console.export_text()
    assert "NO" in shown
    assert "OUTPUTS DIFFER" in shown
