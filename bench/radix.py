"""The HBM tree: what match, insert and evict cost the engine's thread, and what a node weighs.

prompts   groups that share a system prompt, each prompt with a tail of its own; every match
          finds all of its prompt, as do the engine's on a warm cache
leaves    a full cache of short leaves; one is evicted at a time
long      one sequence, as of a long document
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table

from ..tiers.radix import RadixTree
from .timing import environment, interleave, paused_gc, spread, time_each

Tokens = npt.NDArray[np.int32]

_VOCABULARY = 128_000
_LEAF_TOKENS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Sizes, in tokens where not said otherwise; `rounds` is how often each part is measured."""

    num_groups: int = 64
    prompts_per_group: int = 16
    shared_tokens: int = 2048
    own_tokens: int = 512
    num_leaves: int = 40_000
    num_nodes: int = 100_000
    long_tokens: int = 100_000
    rounds: int = 7


def run(workload: Workload | None = None, seed: int = 0) -> dict[str, Any]:
    """Measure everything; a JSON document. Takes about ten seconds at the default size."""
    sizes = workload or Workload()
    rng = np.random.default_rng(seed)
    with paused_gc():
        operations = [
            *_prompts(sizes, rng, seed),
            *_leaves(sizes, rng),
            *_long(sizes, rng),
        ]
    return {
        "benchmark": "radix",
        "environment": environment(),
        "seed": seed,
        "workload": asdict(sizes),
        "operations": operations,
        "memory": _memory(sizes, rng),
    }


def table(result: dict[str, Any]) -> Table:
    memory = result["memory"]
    view = Table(
        title="Radix tree, microseconds per call",
        caption=f"{memory['num_nodes']:,} nodes held at {memory['bytes_per_node']:.0f} bytes each, "
        f"plus {memory['bytes_per_token']:.0f} per token. "
        f"{result['environment']['cpu']}, Python {result['environment']['python']}",
    )
    for heading in ("operation", "input"):
        view.add_column(heading)
    for heading in ("p50", "p99", "calls"):
        view.add_column(heading, justify="right")
    for row in result["operations"]:
        numbers = (f"{row['p50']:.1f}", f"{row['p99']:.1f}", f"{row['count']:,}")
        view.add_row(row["operation"], row["input"], *numbers)
    return view


def _prompts(sizes: Workload, rng: np.random.Generator, seed: int) -> list[dict[str, Any]]:
    prompts = [
        np.concatenate([shared, _tokens(rng, sizes.own_tokens)])
        for shared in (_tokens(rng, sizes.shared_tokens) for _ in range(sizes.num_groups))
        for _ in range(sizes.prompts_per_group)
    ]
    tree, inserts = RadixTree(), list[float]()
    for prompt, slots in zip(prompts, _slots(prompts), strict=True):
        inserts += time_each(partial(tree.insert, prompt), [slots])
    later = [s for i, s in enumerate(inserts) if i % sizes.prompts_per_group]
    # Every form of the same prompts, in turns: none finds the caches warmer than another.
    forms: dict[str, Sequence[Any]] = {
        "int32 array": prompts,
        "packed bytes": [prompt.astype("<i4").tobytes() for prompt in prompts],
        "list": [prompt.tolist() for prompt in prompts],
    }
    rivals: dict[str, Callable[[], list[float]]] = {
        name: partial(time_each, tree.match, form) for name, form in forms.items()
    }
    matches = interleave(rivals, sizes.rounds, seed)
    own, whole = sizes.own_tokens, sizes.shared_tokens + sizes.own_tokens
    return [
        *(
            _row(f"match {whole:,} tokens", name, [s for samples in rounds for s in samples])
            for name, rounds in matches.items()
        ),
        _row(f"insert {own:,} tokens after {sizes.shared_tokens:,} known", "int32 array", later),
    ]


def _leaves(sizes: Workload, rng: np.random.Generator) -> list[dict[str, Any]]:
    tree = _tree_of_leaves(sizes.num_leaves, rng)
    times_s = time_each(tree.evict, [_LEAF_TOKENS] * (sizes.num_leaves // 8))
    return [_row("evict a leaf", f"{sizes.num_leaves:,} leaves", times_s)]


def _long(sizes: Workload, rng: np.random.Generator) -> list[dict[str, Any]]:
    count = sizes.long_tokens
    inserts, matches, evicts = list[float](), list[float](), list[float]()
    for _ in range(sizes.rounds):
        tree, tokens, slots = RadixTree(), _tokens(rng, count), np.arange(count)
        inserts += time_each(partial(tree.insert, tokens), [slots])
        matches += time_each(tree.match, [tokens])
        evicts += time_each(tree.evict, [count])
    called = f"one sequence of {count:,} tokens"
    return [
        _row(f"insert {called}", "int32 array", inserts),
        _row(f"match {called}", "int32 array", matches),
        _row(f"evict {called}", "", evicts),
    ]


def _memory(sizes: Workload, rng: np.random.Generator) -> dict[str, Any]:
    """Bytes per node besides its tokens and slots, of short leaves, as the allocator counts."""
    tracemalloc.start()
    try:
        tree = _tree_of_leaves(sizes.num_nodes, rng)
        held_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    bytes_per_token = np.dtype(np.int32).itemsize + np.dtype(np.int64).itemsize
    return {
        "num_nodes": tree.num_nodes,
        "num_tokens": tree.num_tokens,
        "bytes_per_node": (held_bytes - bytes_per_token * tree.num_tokens) / tree.num_nodes,
        "bytes_per_token": bytes_per_token,
    }


def _tree_of_leaves(num_leaves: int, rng: np.random.Generator) -> RadixTree:
    """Leaves of _LEAF_TOKENS tokens that begin with different ones."""
    tree = RadixTree()
    for leaf in range(num_leaves):
        tokens = _tokens(rng, _LEAF_TOKENS)
        tokens[0] = leaf
        tree.insert(tokens, np.arange(_LEAF_TOKENS) + leaf * _LEAF_TOKENS)
    return tree


def _tokens(rng: np.random.Generator, count: int) -> Tokens:
    return rng.integers(0, _VOCABULARY, count, dtype=np.int32)


def _slots(prompts: list[Tokens]) -> list[npt.NDArray[np.int64]]:
    ends = np.cumsum([len(prompt) for prompt in prompts])
    return [np.arange(e - len(prompt), e) for prompt, e in zip(prompts, ends, strict=True)]


def _row(operation: str, given: str, samples_s: list[float]) -> dict[str, Any]:
    return {"operation": operation, "input": given, **spread(samples_s)}
