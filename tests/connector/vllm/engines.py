"""vLLM engines inside the test's process, or in one of their own where asked to; one at a time."""

import gc
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import vllm.envs
from vllm.config import KVTransferConfig
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.entrypoints.llm import LLM
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams

from rootcellar.connector.vllm.manager import Manager
from rootcellar.tiers.toy import chunk_files

from .models import VOCAB

CORES = sorted(os.sched_getaffinity(0))
"""Of the machine's, those that are ours; an engine in this process binds it to fewer later on."""

CHUNK_TOKENS = 256
CHUNK_BYTES = CHUNK_TOKENS * 1024
"""Of the llama family: 2 layers of keys and values, 2 heads of 32 floats."""

Prompt = Sequence[int]


def tokens(length: int, seed: int = 0) -> list[int]:
    """A prompt of random ids; equal arguments give equal prompts, and one seed's are prefixes."""
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB) for _ in range(length)]


def whole_chunks(num_tokens: int) -> int:
    """Of a prompt of so many tokens, how many the store can have: the last is always computed."""
    return (num_tokens - 1) // CHUNK_TOKENS * CHUNK_TOKENS


def store(
    path: Path | None, dram: str = "64MiB", nvme: str = "256MiB", **knobs: Any
) -> dict[str, Any]:
    """A kv_connector_extra_config; without a path, DRAM alone."""
    disk = {} if path is None else {"nvme_path": str(path), "nvme_bytes": nvme}
    return {"dram_bytes": dram, **disk, **knobs}


def transfer_config(extra_config: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "RootCellarConnector",
        "kv_connector_module_path": "rootcellar.connector.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra_config,
    }


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine generated; cached: prompt tokens it did not compute."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int


def assert_same(answers: Sequence[Answer], expected: Sequence[Answer]) -> None:
    """Equal tokens, and logprobs that differ by no more than the order of additions explains:
    vLLM's kernels add up in another order when part of a prompt is cached."""
    assert [a.tokens for a in answers] == [e.tokens for e in expected]
    for answer, wanted in zip(answers, expected, strict=True):
        assert answer.logprobs == pytest.approx(wanted.logprobs, abs=1e-3)


class Engine:
    def __init__(self, llm: LLM, own_process: bool) -> None:
        self.llm = llm
        self._own_process = own_process

    def ask(
        self,
        prompts: Sequence[Prompt],
        num_tokens: int = 8,
        *,
        salt: str | None = None,
        adapter: LoRARequest | None = None,
    ) -> list[Answer]:
        """Greedy answers of num_tokens tokens each."""
        outputs = self.llm.generate(
            [offer(prompt, salt) for prompt in prompts],
            greedy(num_tokens),
            use_tqdm=False,
            lora_request=adapter,
        )
        return [_answer(output) for output in outputs]

    def forget(self) -> None:
        """Empty vLLM's own prefix cache; the store keeps what it has."""
        assert self.llm.reset_prefix_cache()

    def wait_for_files(self, path: Path, num_chunks: int) -> None:
        """Until the store at `path` has that many chunk files or more."""
        wait_until(lambda: self._step_idle() and len(chunk_files(path)) >= num_chunks)

    # The rest needs an engine that is in this process.

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def manager(self) -> Manager:
        manager = self.scheduler.connector.connector_scheduler.manager
        assert isinstance(manager, Manager)
        return manager

    def count_preemptions(self) -> list[str]:
        """A list that from now on grows by the id of each request that vLLM preempts."""
        preempted: list[str] = []
        preempt = self.scheduler._preempt_request

        def counting(request: Any, *arguments: Any, **more: Any) -> None:
            preempted.append(request.request_id)
            preempt(request, *arguments, **more)

        self.scheduler._preempt_request = counting
        return preempted

    def settle(self) -> None:
        """Step as an idle engine does, until nothing is under way and everything is on NVMe."""
        wait_until(self._step_idle)
        assert self.manager.store.flush()
        wait_until(self._step_idle)

    def step_until_idle(self) -> None:
        wait_until(self._step_idle)

    def _step_idle(self) -> bool:
        """Whether nothing is under way; an engine in its own process steps by itself."""
        if self._own_process:
            return True
        if self.scheduler.has_requests():
            self.llm.llm_engine.step()
        return not self.scheduler.has_requests()

    def check_at_rest(self) -> None:
        """With no request left: nothing is pinned, nothing is remembered, all accounts agree."""
        self.settle()
        manager, connector = self.manager, self.scheduler.connector.connector_scheduler
        stats = manager.store.stats()
        assert stats["dram"]["slots_pinned"] == 0
        assert stats["open_loads"] == 0
        assert not connector._jobs
        assert not connector._req_status
        assert not connector._chunks_being_loaded
        assert not manager._requests
        assert all(not s.storing for s in manager._requests.values())
        manager.store.check_integrity()


def offer(prompt: Prompt, salt: str | None = None) -> Any:
    """As vLLM takes it."""
    more = {} if salt is None else {"cache_salt": salt}
    return TokensPrompt(prompt_token_ids=list(prompt), **more)


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, logprobs=0
    )


@contextmanager
def engine(
    model: Path,
    extra_config: dict[str, Any] | None = None,
    *,
    own_process: bool = False,
    **settings: Any,
) -> Iterator[Engine]:
    """An engine with our connector, or with none where there is no extra_config."""
    vllm.envs.disable_envs_cache()  # the last engine in this process left one
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if own_process else "0"
    if extra_config is not None:
        settings["kv_transfer_config"] = KVTransferConfig(**transfer_config(extra_config))
    try:
        llm = LLM(str(model), **(DEFAULTS | settings))
        try:
            yield Engine(llm, own_process)
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
    finally:  # also of an engine that did not start, for the sake of the next one
        gc.collect()
        cleanup_dist_env_and_memory()


DEFAULTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 8192,
    "max_num_batched_tokens": 2048,
}


def plain(
    model: Path, prompts: Sequence[Prompt], num_tokens: int = 8, **settings: Any
) -> list[Answer]:
    """The answers of vLLM without a connector and without any prefix cache. No other engine may be
    open."""
    return list(_plain(model, tuple(map(tuple, prompts)), num_tokens, tuple(settings.items())))


@cache
def _plain(
    model: Path,
    prompts: tuple[tuple[int, ...], ...],
    num_tokens: int,
    settings: tuple[tuple[str, Any], ...],
) -> list[Answer]:
    with engine(model, enable_prefix_caching=False, **dict(settings)) as without:
        return without.ask(prompts, num_tokens)


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{condition} did not come true"
        time.sleep(0.005)


def _answer(output: Any) -> Answer:
    (completion,) = output.outputs
    return Answer(
        tokens=tuple(completion.token_ids),
        logprobs=tuple(
            step[token].logprob
            for step, token in zip(completion.logprobs, completion.token_ids, strict=True)
        ),
        cached=output.num_cached_tokens,
    )
