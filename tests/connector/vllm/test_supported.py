"""What cannot be served is refused at start, in words that say what to change."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import KVTransferConfig, VllmConfig
from vllm.config.attention import HiSparseConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    UniformTypeKVCacheSpecs,
)

from rootcellar.connector.vllm.supported import (
    SUPPORTED,
    UnsupportedVllmError,
    check_cache,
    check_engine,
    check_version,
    installed_version,
)

Change = tuple[str, str, Any]
"""Part of the configuration, field and value."""


@pytest.fixture
def engine(llama: Path) -> VllmConfig:
    return EngineArgs(
        model=str(llama),
        skip_tokenizer_init=True,
        enforce_eager=True,
        kv_transfer_config=KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both"),
    ).create_engine_config()


def _change(engine: VllmConfig, change: Change) -> None:
    """Behind the back of vLLM's own checks, some of which this machine would not pass."""
    part, name, value = change
    config = getattr(engine, part)
    if isinstance(getattr(type(config), name, None), property):
        config.__class__ = type("Config", (type(config),), {name: value})
    else:
        object.__setattr__(config, name, value)


REFUSED: dict[str, Change] = {
    "pipeline_parallel_size is 2": ("parallel_config", "pipeline_parallel_size", 2),
    "prefill_context_parallel_size is 2": ("parallel_config", "prefill_context_parallel_size", 2),
    "decode_context_parallel_size is 4": ("parallel_config", "decode_context_parallel_size", 4),
    "span 2 nodes": ("parallel_config", "nnodes", 2),
    "'ray', must be 'mp'": ("parallel_config", "distributed_executor_backend", "ray"),
    "is 'xxhash', must be": ("cache_config", "prefix_caching_hash_algo", "xxhash"),
    "hashes collide": ("cache_config", "prefix_caching_hash_algo", "xxhash_cbor"),
    "kv_role is 'kv_producer'": ("kv_transfer_config", "kv_role", "kv_producer"),
    "HiSparse": ("attention_config", "hisparse_config", HiSparseConfig()),
    "not causal": ("attention_config", "use_non_causal", True),
    "later": ("model_config", "is_diffusion", True),
    "encoder-decoder": ("model_config", "is_encoder_decoder", True),
}

SERVED: list[Change] = [
    ("cache_config", "enable_prefix_caching", False),
    ("cache_config", "prefix_caching_hash_algo", "sha256_cbor"),
    ("parallel_config", "data_parallel_size", 2),
    ("parallel_config", "distributed_executor_backend", "mp"),
    ("kv_transfer_config", "kv_load_failure_policy", "recompute"),
]


def test_the_installed_vllm_is_supported() -> None:
    check_version(installed_version())


@given(st.sampled_from(SUPPORTED), st.integers(0, 99), st.sampled_from(["", "rc1", "+cpu", ".x"]))
def test_every_release_of_a_supported_series_is_taken(series: str, patch: int, suffix: str) -> None:
    check_version(f"{series}.{patch}{suffix}")


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "0.3.2", "1.32.0", "0.320.1", "dev", ""])
def test_other_releases_are_refused_with_what_to_do(version: str) -> None:
    with pytest.raises(UnsupportedVllmError, match=r"supported: 0\.32\.x\. Install") as refusal:
        check_version(version)
    assert f"vLLM {version};" in str(refusal.value)


def test_an_ordinary_engine_is_served(engine: VllmConfig) -> None:
    check_engine(engine)


@pytest.mark.parametrize("change", SERVED, ids=[field for _, field, _ in SERVED])
def test_what_makes_no_difference_is_left_to_the_user(engine: VllmConfig, change: Change) -> None:
    _change(engine, change)
    check_engine(engine)


@pytest.mark.parametrize("why", REFUSED)
def test_an_engine_that_cannot_be_served_is_refused(engine: VllmConfig, why: str) -> None:
    _change(engine, REFUSED[why])
    with pytest.raises(UnsupportedVllmError, match=why):
        check_engine(engine)


def test_all_that_is_wrong_is_said_at_once(engine: VllmConfig) -> None:
    for change in list(REFUSED.values())[:2]:
        _change(engine, change)
    with pytest.raises(UnsupportedVllmError, match=r"pipeline_.*; prefill_"):
        check_engine(engine)


def _cache(*, uniform: bool, non_causal: bool) -> KVCacheConfig:
    causal = FullAttentionSpec(block_size=128, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
    last = FullAttentionSpec(
        block_size=128, num_kv_heads=1, head_size=32, dtype=torch.bfloat16, non_causal=non_causal
    )
    both = UniformTypeKVCacheSpecs(block_size=128, kv_cache_specs={"0": causal, "1": last})
    groups = (
        [KVCacheGroupSpec(["0", "1"], both)]
        if uniform
        else [KVCacheGroupSpec(["0"], causal), KVCacheGroupSpec(["1"], last)]
    )
    return KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=groups)


@pytest.mark.parametrize("uniform", [True, False])
def test_a_layer_that_looks_ahead_is_found_in_any_group(uniform: bool) -> None:
    check_cache(_cache(uniform=uniform, non_causal=False))
    with pytest.raises(UnsupportedVllmError, match="not causal"):
        check_cache(_cache(uniform=uniform, non_causal=True))
