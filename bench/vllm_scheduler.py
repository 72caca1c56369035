"""What the connector costs vLLM's scheduler thread, next to vLLM's own hashing of the same prompt.

In the real engine, in this process: a prompt is served cold, then again after the engine forgot
its own cache, so that every chunk is a hit. Per request, the time spent in the manager's lookup,
prepare_load and prepare_store is set against the time vLLM took to hash the prompt's blocks.
Single lookups are too short to be timed one by one: the request's are repeated in one loop.
"""

import importlib.util
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.table import Table

from .timing import environment, paused_gc

PROMPT_TOKENS = 32_768
BLOCK_SIZES = (32, 128)
"""The smallest that vLLM's CPU backend takes, and its default."""


def run(rounds: int = 5, prompt_tokens: int = PROMPT_TOKENS) -> dict[str, Any]:
    """Rows of medians over `rounds` prompts, in microseconds per request.

    Raises ValueError where vLLM is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ValueError("vLLM is not installed here: install rootcellar beside it")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory() as folder:
        model = _save_model(Path(folder) / "model", prompt_tokens)
        rows = [
            row
            for block_size in BLOCK_SIZES
            for row in _measure(model, block_size, rounds, prompt_tokens)
        ]
    return {
        "benchmark": "vllm-scheduler",
        "environment": environment(),
        "prompt_tokens": prompt_tokens,
        "rows": rows,
    }


def table(result: dict[str, Any]) -> Table:
    view = Table(title=f"Scheduler time per request of {result['prompt_tokens']} tokens, in us")
    for name in ("block", "outcome", "hashing", "lookup", "load", "store", "ours / hashing"):
        view.add_column(name, justify="right")
    for row in result["rows"]:
        parts = [f"{row[f'{part}_us']:.0f}" for part in ("hashing", "lookup", "load", "store")]
        view.add_row(str(row["block_tokens"]), row["outcome"], *parts, f"{row['share']:.1%}")
    return view


def _measure(
    model: Path, block_size: int, rounds: int, prompt_tokens: int
) -> Iterator[dict[str, Any]]:
    from vllm import SamplingParams

    rng = random.Random(block_size)
    sampling = SamplingParams(temperature=0, max_tokens=4, detokenize=False)
    with _engine(model, block_size, prompt_tokens) as llm, paused_gc():
        probe = _Probe(llm)
        samples: dict[str, list[dict[str, float]]] = {"miss": [], "hit": []}
        for _ in range(rounds):
            prompt = {"prompt_token_ids": [rng.randrange(512) for _ in range(prompt_tokens)]}
            for outcome in ("miss", "hit"):
                probe.begin()
                llm.generate([prompt], sampling, use_tqdm=False)
                samples[outcome].append(probe.end())
                assert llm.reset_prefix_cache()
        for outcome, seen in samples.items():
            parts = {part: statistics.median(s[part] for s in seen) for part in seen[0]}
            ours = parts["lookup_us"] + parts["load_us"] + parts["store_us"]
            share = ours / parts["hashing_us"]
            yield {"block_tokens": block_size, "outcome": outcome, **parts, "share": share}


class _Probe:
    """Times the calls of one request at a time, inside the engine of this process."""

    def __init__(self, llm: Any) -> None:
        core = llm.llm_engine.engine_core.engine_core
        self._manager = core.scheduler.connector.connector_scheduler.manager
        self._spent: dict[str, float] = {}
        self._lookups: list[tuple[Any, Any]] = []
        core.request_block_hasher = self._timed("hashing", core.request_block_hasher)
        for name, part in (
            ("ask", "lookup"),
            ("prepare_load", "load"),
            ("prepare_store", "store"),
        ):
            setattr(self._manager, name, self._timed(part, getattr(self._manager, name)))
        self._lookup = self._manager.lookup
        self._manager.lookup = self._recorded

    def begin(self) -> None:
        self._spent = dict.fromkeys(("hashing", "lookup", "load", "store"), 0.0)
        self._lookups = []

    def end(self) -> dict[str, float]:
        """Microseconds by part."""
        lookup = self._lookup
        began = time.perf_counter()
        for key, context in self._lookups:
            lookup(key, context)
        self._spent["lookup"] += time.perf_counter() - began
        return {f"{part}_us": seconds * 1e6 for part, seconds in self._spent.items()}

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = call(*arguments)
            self._spent[part] = self._spent.get(part, 0.0) + time.perf_counter() - began
            return result

        return timed

    def _recorded(self, key: Any, context: Any) -> Any:
        self._lookups.append((key, context))
        return self._lookup(key, context)


@contextmanager
def _engine(model: Path, block_size: int, prompt_tokens: int) -> Iterator[Any]:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(
        kv_connector="RootCellarConnector",
        kv_connector_module_path="rootcellar.connector.vllm",
        kv_role="kv_both",
        kv_connector_extra_config={"dram_bytes": "1GiB"},
    )
    llm = LLM(
        str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=block_size,
        max_model_len=prompt_tokens + 4,
        max_num_batched_tokens=prompt_tokens + 4,
        kv_transfer_config=transfer,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def _save_model(folder: Path, prompt_tokens: int) -> Path:
    """A Llama of random weights, as small as vLLM takes them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=prompt_tokens + 4,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
