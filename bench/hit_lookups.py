"""What the engine's thread pays to ask for a prompt of 100,000 tokens, before any byte moves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..admission.base import Key, Tier
from ..tiers.chunk_file import file_bytes
from ..tiers.config import StoreConfig
from ..tiers.io.base import Codec
from ..tiers.keys import chunk_keys
from ..tiers.layout import KVLayout, Namespace
from ..tiers.store import TieredStore
from .hit_stores import require_tier
from .timing import interleave, paused_gc, spread, time_each

NUM_TOKENS = 100_000
CALLS_PER_ROUND = 40

# The smallest chunks there are: only their number matters.
_LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, dtype="int8")
_NAMESPACE = Namespace(model="bench/lookup", revision="1", layout=_LAYOUT)


def measure_lookups(root: Path, rounds: int, seed: int) -> list[dict[str, Any]]:
    """Rows of {"operation", "p50", "p99", "count"}, in microseconds. Makes a store at `root`."""
    tokens = np.random.default_rng(seed).integers(0, 128_000, NUM_TOKENS, dtype=np.int32)
    keys = chunk_keys(tokens, _NAMESPACE)
    absent = chunk_keys(tokens, _NAMESPACE, salt="absent")
    config = StoreConfig(
        dram_bytes=len(keys) * 4096,
        nvme_path=root,
        nvme_bytes=len(keys) * file_bytes(_LAYOUT.chunk_bytes, Codec.RAW),
        io="threads",
    )
    with TieredStore(config, _NAMESPACE) as store:
        store.put(keys, [torch.zeros(_LAYOUT.shape(256), dtype=torch.int8)] * len(keys))
        require_tier(store, keys, Tier.DRAM)
        in_dram = _rounds({"in DRAM": partial(store.lookup, keys)}, rounds, seed)
    with TieredStore(config, _NAMESPACE) as store:
        require_tier(store, keys, Tier.NVME)
        calls: dict[str, Callable[[], object]] = {
            "on NVMe": partial(store.lookup, keys),
            "absent": partial(store.lookup, absent),
            "absent, and its load": partial(_miss, store, absent),
            "keys of an int32 array": partial(chunk_keys, tokens, _NAMESPACE),
        }
        return in_dram + _rounds(calls, rounds, seed)


def _rounds(calls: dict[str, Callable[[], object]], rounds: int, seed: int) -> list[dict[str, Any]]:
    rivals = {name: partial(_times, call) for name, call in calls.items()}
    with paused_gc():
        taken = interleave(rivals, rounds, seed)
    return [
        {"operation": name, **spread([s for samples in taken[name] for s in samples])}
        for name in calls
    ]


def _times(call: Callable[[], object]) -> list[float]:
    return time_each(lambda _: call(), range(CALLS_PER_ROUND))


def _miss(store: TieredStore, keys: list[Key]) -> None:
    store.lookup(keys)
    store.complete_load(store.prepare_load(keys))
