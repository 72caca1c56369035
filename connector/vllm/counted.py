"""Which settings of an engine count as changing KV bytes, and how they are written down.

All count but those listed here as of no consequence: what this page does not know may cost a
cache, never serve wrong KV.
"""

import json
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Literal

Part = Literal["model", "cache", "attention", "inputs"]

UNCOUNTED: dict[Part, frozenset[str]] = {
    # Named by the revision, described by hf_config, about text, sampling or answers, or memory.
    "model": frozenset(
        {
            "model",
            "model_weights",
            "revision",
            "hf_config",
            "hf_text_config",
            "hf_config_path",
            "hf_overrides",
            "hf_token",
            "config_format",
            "tokenizer",
            "tokenizer_mode",
            "tokenizer_revision",
            "skip_tokenizer_init",
            "served_model_name",
            "allowed_local_media_path",
            "allowed_media_domains",
            "seed",
            "max_model_len",
            "spec_target_max_model_len",
            "enforce_eager",
            "return_sampling_mask",
            "max_logprobs",
            "logprobs_mode",
            "use_fp64_gumbel",
            "enable_trace_replay",
            "disable_cascade_attn",
            "enable_prompt_embeds",
            "override_generation_config",
            "enable_sleep_mode",
            "sleep_preserve_parameter_names",
            "sleep_mode_backend",
            "sleep_mode_offload_cudagraph",
            "enable_nccl_comm_suspend",
            "enable_cumem_allocator",
            "logits_processors",
            "io_processor_plugin",
            "renderer_num_workers",
            "pooler_config",
            "multimodal_config",
            "word_embeddings_untied_by_checkpoint",
            "is_submodel_config",
            "allow_deprecated_quantization",
        }
    ),
    # Sizes of pools, names of hashes (which are in the keys) and which hits vLLM keeps to itself.
    "cache": frozenset(
        {
            "gpu_memory_utilization",
            "num_gpu_blocks",
            "num_gpu_blocks_override",
            "num_cpu_blocks",
            "kv_cache_memory_bytes",
            "kv_cache_size_tokens",
            "kv_cache_max_concurrency",
            "kv_offloading_size",
            "kv_offloading_backend",
            "enable_prefix_caching",
            "prefix_caching_hash_algo",
            "prefix_match_unit",
            "prefix_cache_retention_interval",
            "enable_mamba_shared_prefix_checkpoint",
            "hash_block_size",
            "cache_hit_alignment_tokens",
            "effective_attention_block_size",
            "user_specified_block_size",
            "_block_size_resolved",
            "is_attention_free",
        }
    ),
    # Sizes of workspaces and of grids.
    "attention": frozenset(
        {
            "flash_attn_max_num_splits_for_cuda_graph",
            "sparse_mla_prefill_workspace_factor",
            "tq_max_kv_splits_for_cuda_graph",
        }
    ),
    # How inputs are passed and cached; what they are is in the keys.
    "inputs": frozenset(
        {
            "limit_per_prompt",
            "enable_mm_embeds",
            "mm_processor_cache_gb",
            "mm_processor_cache_type",
            "mm_hasher_algorithm",
            "mm_shm_cache_max_object_size_mb",
            "mm_encoder_tp_mode",
            "mm_encoder_fp8_scale_save_path",
            "mm_encoder_fp8_scale_save_margin",
            "skip_mm_profiling",
            "mm_tensor_ipc",
            "mm_ipc_gpu_memory_gb",
            "interleave_mm_strings",
        }
    ),
}

_BOOKKEEPING = frozenset(
    {"_name_or_path", "_commit_hash", "id2label", "label2id", "transformers_version"}
)
"""Fields of a model's configuration that name things and compute nothing."""


def described(config: Any) -> dict[str, Any]:
    """A configuration of transformers as JSON values, less what only names things."""
    values = plain(config.to_dict())
    assert isinstance(values, dict)
    return values


def counted(part: Part, config: Any) -> dict[str, Any] | None:
    """The fields of one of vLLM's configurations that count."""
    if config is None:
        return None
    names = [field.name for field in fields(config) if field.name not in UNCOUNTED[part]]
    return {name: plain(getattr(config, name)) for name in names}


def plain(value: Any) -> Any:
    """JSON values for whatever a configuration holds: equal for equal values in any process."""
    if isinstance(value, Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str | int):
        return str(value) if isinstance(value, str) else int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items() if str(k) not in _BOOKKEEPING}
    if isinstance(value, Set):
        return sorted((plain(item) for item in value), key=json.dumps)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(item) for item in value]
    if isinstance(value, type) or callable(value):
        named = value if hasattr(value, "__qualname__") else type(value)
        return f"{named.__module__}.{named.__qualname__}"
    if is_dataclass(value):
        names = [field.name for field in fields(value)]
        return {"": type(value).__qualname__, **{n: plain(getattr(value, n)) for n in names}}
    if hasattr(value, "__dict__"):
        return {"": type(value).__qualname__, **plain(vars(value))}
    return str(value)
