"""Offline engines: a prompt computed once is loaded from then on, also after a restart."""

from pathlib import Path

import pytest
from vllm.v1.metrics.prometheus import REGISTRY

from .engines import (
    CHUNK_TOKENS,
    Answer,
    Engine,
    assert_same,
    engine,
    plain,
    store,
    tokens,
    whole_chunks,
)

PROMPTS = [tokens(2000), tokens(1000, seed=1), tokens(600) + tokens(700, seed=2), tokens(100)]
NUM_CHUNKS = 7 + 3 + 3
"""The third prompt has its first two chunks in common with the first."""


@pytest.mark.parametrize("own_process", [False, True], ids=["in process", "own process"])
def test_warm_answers_equal_cold_ones_and_those_of_vllm_alone_also_after_a_restart(
    llama: Path, tmp_path: Path, own_process: bool
) -> None:
    expected = plain(llama, PROMPTS)
    root, wanted = tmp_path / "kv", [whole_chunks(len(prompt)) for prompt in PROMPTS]
    with engine(llama, store(root, write_down="eager"), own_process=own_process) as first:
        cold = first.ask(PROMPTS)
        first.wait_for_files(root, NUM_CHUNKS)
        first.forget()
        warm = first.ask(PROMPTS)
    with engine(llama, store(root, write_down="eager"), own_process=own_process) as second:
        restarted = second.ask(PROMPTS)
    assert_same(cold, expected)
    assert_same(warm, expected)
    assert_same(restarted, expected)
    assert [answer.cached for answer in warm] == wanted
    assert [answer.cached for answer in restarted] == wanted


def test_hits_are_counted_by_the_tier_that_had_them(llama: Path, tmp_path: Path) -> None:
    root = tmp_path / "kv"
    with engine(llama, store(root)) as first:
        first.ask(PROMPTS[:1])
        first.forget()
        first.ask(PROMPTS[:1])
        assert first.manager.store.stats()["hit_tokens"] == {"dram": 1792, "nvme": 0}
        first.check_at_rest()
    with engine(llama, store(root)) as second:
        second.ask(PROMPTS[:1])
        assert second.manager.store.stats()["hit_tokens"] == {"dram": 0, "nvme": 1792}
        second.check_at_rest()


def test_engines_that_follow_each_other_in_one_process_may_all_publish_metrics(llama: Path) -> None:
    for _ in range(2):
        with engine(llama, store(None), disable_log_stats=False) as published:
            published.ask(PROMPTS[:1])
            published.settle()
            name = "rootcellar:stored_chunks_total"
            samples = [s for m in REGISTRY.collect() for s in m.samples if s.name == name]
            assert [sample.value for sample in samples] == [7]


def test_dram_alone_serves_until_the_engine_ends(llama: Path) -> None:
    expected = plain(llama, PROMPTS)
    with engine(llama, store(None)) as first:
        first.ask(PROMPTS)
        first.forget()
        warm = first.ask(PROMPTS)
        first.check_at_rest()
    with engine(llama, store(None)) as second:
        restarted = second.ask(PROMPTS)
    assert_same(warm, expected)
    assert [answer.cached for answer in warm] == [whole_chunks(len(p)) for p in PROMPTS]
    assert restarted[0].cached == 0


ANSWER = 300
"""Tokens generated per turn: more than a chunk."""


@pytest.mark.parametrize("prompt_only", [False, True])
def test_in_a_chat_of_three_turns_answers_are_loaded_too_where_that_is_asked_for(
    llama: Path, tmp_path: Path, prompt_only: bool
) -> None:
    turns = _chat(llama)
    knobs = store(tmp_path / "kv", offload_prompt_only=prompt_only)
    stored = 0  # tokens from the head on that were ever stored
    with engine(llama, knobs) as first:
        for prompt, expected in turns[:2]:
            stored = _check_turn(first, prompt, expected, stored, prompt_only)
        first.check_at_rest()
    with engine(llama, knobs) as second:
        _check_turn(second, *turns[2], stored, prompt_only)


def _chat(model: Path) -> list[tuple[list[int], Answer]]:
    """(prompt, answer) of each turn: a prompt is all that was said before and 100 new tokens."""
    said: list[int] = []
    turns: list[tuple[list[int], Answer]] = []
    with engine(model, enable_prefix_caching=False) as without:
        for turn in range(3):
            prompt = said + tokens(100 if said else 400, seed=turn)
            (answer,) = without.ask([prompt], ANSWER)
            turns.append((prompt, answer))
            said = prompt + list(answer.tokens)
    return turns


def _check_turn(
    chatting: Engine, prompt: list[int], expected: Answer, stored: int, prompt_only: bool
) -> int:
    """Returns how many tokens the store must have after this turn."""
    (answer,) = chatting.ask([prompt], ANSWER)
    assert_same([answer], [expected])
    assert answer.cached == stored
    chatting.settle()
    chatting.forget()
    # The last token generated is never run through the model, so it has no KV.
    computed = len(prompt) if prompt_only else len(prompt) + ANSWER - 1
    return computed // CHUNK_TOKENS * CHUNK_TOKENS
