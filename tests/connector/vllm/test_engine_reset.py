"""Resets while requests run, and pins that nobody would take: each was a fault once."""

from pathlib import Path
from typing import Any

import torch
from vllm.sampling_params import SamplingParams

from .engines import CHUNK_BYTES, Engine, engine, greedy, offer, plain, store, tokens
from .models import save_model

PROMPT = tokens(1000)


def run(running: Engine, *, steps: int | None = None) -> None:
    """So many steps, or as many as it takes."""
    requests = running.llm.llm_engine
    while requests.has_unfinished_requests() and steps != 0:
        requests.step()
        steps = None if steps is None else steps - 1


def pinned(running: Engine) -> int:
    count: int = running.manager.store.stats()["dram"]["slots_pinned"]
    return count


def test_a_request_that_is_preempted_and_loads_anew_in_one_step_goes_on(
    llama: Path, tmp_path: Path
) -> None:
    with engine(llama, store(tmp_path / "kv")) as running:
        running.ask([PROMPT])
        running.settle()
        running.forget()
        running.llm.llm_engine.add_request("a", offer(PROMPT), greedy(50))
        run(running, steps=4)
        assert running.llm.reset_prefix_cache(reset_running_requests=True)
        run(running)
        running.check_at_rest()


def test_kv_of_weights_from_before_a_reset_is_not_stored_after_it(
    llama: Path, tmp_path: Path
) -> None:
    with engine(llama, store(tmp_path / "kv", offload_prompt_only=False)) as running:
        running.llm.llm_engine.add_request("a", offer(PROMPT), greedy(30))
        run(running, steps=4)
        _change_norms(running.llm.llm_engine.model_executor)
        running.llm.reset_prefix_cache(reset_connector=True)
        run(running)
        running.settle()
        running.forget()
        after = running.ask([PROMPT])[0]
        assert after.cached == 0
        running.settle()
        running.forget()
        assert running.ask([PROMPT])[0].tokens == after.tokens


def test_windows_that_were_dropped_are_not_stored_again_after_a_reset(
    models: Path, tmp_path: Path
) -> None:
    """vLLM offers a request's chunks anew, and their blocks are others' by then."""
    model = save_model(models / "reset-gemma", "gemma")
    crowded: dict[str, Any] = {
        "max_model_len": 2048,
        "num_gpu_blocks_override": 60,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 384,
    }
    prompt, others = tokens(1024, seed=4), [tokens(1000, seed=20 + i) for i in range(8)]
    expected = plain(model, [prompt], 60, **crowded)
    with engine(model, store(tmp_path / "kv"), **crowded) as running:
        requests = running.llm.llm_engine
        requests.add_request("a", offer(prompt), greedy(300))
        run(running, steps=6)
        for number, other in enumerate(others):
            requests.add_request(f"b{number}", offer(other), greedy(2))
        run(running, steps=60)
        running.llm.reset_prefix_cache(reset_connector=True)
        run(running)
        running.settle()
        running.forget()
        assert running.ask([prompt], 60)[0].tokens == expected[0].tokens


def test_a_request_that_may_not_use_the_cache_reads_and_pins_nothing(
    llama: Path, tmp_path: Path
) -> None:
    with engine(llama, store(tmp_path / "kv", dram=f"{16 * CHUNK_BYTES}B")) as running:
        for seed in range(4):
            running.ask([tokens(2000, seed=seed)])
            running.settle()
        running.forget()
        logprobs = SamplingParams(max_tokens=50, detokenize=False, prompt_logprobs=0)
        running.llm.llm_engine.add_request("a", offer(tokens(2000)), logprobs)
        run(running, steps=10)
        assert pinned(running) == 0
        run(running)


def test_a_request_whose_windows_miss_runs_without_its_chunks_pinned(
    models: Path, tmp_path: Path
) -> None:
    model = save_model(models / "pins-gemma", "gemma")
    with engine(model, store(tmp_path / "kv")) as running:
        running.ask([tokens(1500)])
        running.settle()
        running.forget()
        # The same head and another end: the window at the border was never stored.
        prompt = tokens(600) + tokens(500, seed=9)
        running.llm.llm_engine.add_request("a", offer(prompt), greedy(40))
        run(running, steps=10)
        assert running.scheduler.running
        assert pinned(running) == 0
        run(running)
        running.check_at_rest()


def _change_norms(executor: Any) -> None:
    """As a trainer does that updates weights in place."""
    worker = executor.driver_worker
    model = getattr(worker, "worker", worker).model_runner.model
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "layernorm" in name:
                weights.mul_(torch.rand(weights.shape) * 2)
