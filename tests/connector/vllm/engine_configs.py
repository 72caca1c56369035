"""Configurations of engines that are never started, and their namespaces.

Imports nothing of its neighbours, so that a process of its own can import it by its folder.
"""

from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)

from rootcellar.connector.vllm.identity import engine_namespace
from rootcellar.tiers.layout import Namespace

SPEC: dict[str, Any] = {
    "block_size": 128,
    "num_kv_heads": 2,
    "head_size": 32,
    "dtype": torch.bfloat16,
}
LAYERS = ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]


def engine(model: Path, **arguments: Any) -> VllmConfig:
    defaults = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 4096}
    return EngineArgs(model=str(model), **(defaults | arguments)).create_engine_config()


def cache(*, num_blocks: int = 100, layout: str = "LBHNC", **spec: Any) -> KVCacheConfig:
    """What the scheduler is told of two layers of full attention."""
    block = FullAttentionSpec(**(SPEC | spec))
    tensor = KVCacheTensor(
        size=2 * num_blocks * block.page_size_bytes,
        layers=LAYERS,
        layer_stride=num_blocks * block.page_size_bytes,
        block_stride=block.page_size_bytes,
    )
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[tensor],
        kv_cache_groups=[KVCacheGroupSpec(LAYERS, block)],
        kv_cache_layout=layout,
        hash_block_size=128,
    )


def namespace(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None = None, **more: Any
) -> Namespace:
    arguments: dict[str, Any] = {
        "chunk_bytes": 1 << 16,
        "chunk_tokens": 256,
        "weights_id": None,
        "durable": True,
    }
    return engine_namespace(vllm_config, kv_cache_config or cache(), **(arguments | more))
