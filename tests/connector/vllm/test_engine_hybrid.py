"""Models with more than one kind of attention, and engines with more than one worker."""

from pathlib import Path

import pytest

from .engines import CORES, assert_same, engine, plain, store, tokens, whole_chunks
from .models import save_model

PROMPTS = [
    tokens(2000),
    tokens(1100, seed=1),
    tokens(600) + tokens(700, seed=2),
    tokens(290, seed=3),
]


@pytest.mark.parametrize("family", ["gemma", "mistral"])
def test_a_model_with_sliding_windows_answers_as_without_us_warm_and_restarted(
    models: Path, tmp_path: Path, family: str
) -> None:
    model, root = save_model(models / family, family), tmp_path / "kv"
    expected = plain(model, PROMPTS)
    with engine(model, store(root)) as first:
        cold = first.ask(PROMPTS)
        first.settle()
        first.forget()
        warm = first.ask(PROMPTS)
        first.check_at_rest()
    with engine(model, store(root)) as second:
        restarted = second.ask(PROMPTS)
        second.check_at_rest()
    for answers in (cold, warm, restarted):
        assert_same(answers, expected)
    wanted = [whole_chunks(len(prompt)) for prompt in PROMPTS]
    assert [answer.cached for answer in warm] == wanted
    assert [answer.cached for answer in restarted] == wanted


def test_two_workers_each_bring_their_half_of_every_chunk(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One core each: left to itself, vLLM asks for a NUMA node per worker.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{CORES[0]}|{CORES[-1]}")
    expected, root = plain(llama, PROMPTS), tmp_path / "kv"
    wanted = [whole_chunks(len(prompt)) for prompt in PROMPTS]
    for start in range(2):
        with engine(
            llama, store(root, write_down="eager"), own_process=True, tensor_parallel_size=2
        ) as halves:
            first = halves.ask(PROMPTS)
            halves.wait_for_files(root, 7 + 4 + 3 + 1)
            halves.forget()
            warm = halves.ask(PROMPTS)
        assert_same(first, expected)
        assert_same(warm, expected)
        assert [answer.cached for answer in warm] == wanted
        if start:
            assert [answer.cached for answer in first] == wanted
