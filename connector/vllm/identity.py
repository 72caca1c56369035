"""Everything about an engine that changes KV bytes, as a namespace.

The namespace is the same in every process that runs the same command; it holds no object's
address, no size of a pool and no path of the model. Kernels that vLLM changes from one batch to
the next (compiled or eager, fused or not) differ in rounding alone and are one.
"""

import importlib.metadata
import json
import math
import os
import platform
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm import envs
from vllm.platforms import current_platform

from ...tiers.layout import ITEMSIZES, KVLayout, Namespace
from .counted import counted, described, plain
from .supported import check_cache, installed_version
from .weights import weights_revision

NAMELESS = "this process"
"""Revision of weights whose KV does not outlive the process."""

_FILE_FORMATS = frozenset(
    {
        "auto",
        "bitsandbytes",
        "fastsafetensors",
        "gguf",
        "hf",
        "instanttensor",
        "mistral",
        "pt",
        "runai_streamer",
        "safetensors",
        "sharded_state",
    }
)
"""Load formats that read the model's own directory or its hub commit, and nothing else."""

_PLACEMENT = re.compile(r"_(DP|LOG|LOGGING|PORT|PROFILING|RAY)(_|$)|^RAY_")
"""Environment that says where things run and what is written down about it."""

_PACKAGES = ("torch", "transformers", "triton", "flashinfer-python", "flash-attn")
"""Beside vLLM, whose kernels and input processors compute KV."""

_NO_DRAFT_MODEL = frozenset({"ngram", "ngram_gpu", "suffix"})


def engine_namespace(
    vllm_config: Any,
    kv_cache_config: Any,
    *,
    chunk_bytes: int,
    chunk_tokens: int,
    weights_id: str | None,
    durable: bool,
    weights_cache: Path | None = None,
) -> Namespace:
    """Of a VllmConfig and the scheduler's KVCacheConfig, both complete.

    chunk_bytes, chunk_tokens: of a slot, opaque to the store; whether ranks have slices of it or
    share one copy shows in its size. weights_id: the user's name for the weights, None to take
    the hub commit or read the files. durable: whether chunks outlive the process; without, weights
    need no name. weights_cache: where digests of weight files are remembered.

    UnsupportedVllmError if KV is no function of the tokens before it; ValueError where the weights
    have no name; OSError where they cannot be read.
    """
    check_cache(kv_cache_config)
    model = vllm_config.model_config
    named = {}
    if durable:
        named["target"] = _revision(vllm_config, model, weights_id, weights_cache)
        if (draft := _draft_model(vllm_config)) is not None and draft.model != model.model:
            named["draft"] = _revision(vllm_config, draft, weights_id, weights_cache)
    text = described(model.hf_text_config)
    return Namespace(
        model=" ".join(model.architectures) or "unnamed architecture",
        revision=named.get("target", NAMELESS),
        layout=_layout(kv_cache_config, chunk_bytes, chunk_tokens),
        rope={name: text[name] for name in sorted(text) if name.startswith("rope_")},
        backend=f"vLLM {installed_version()}, {_device()}, {kv_cache_config.kv_cache_layout}",
        tp_size=vllm_config.parallel_config.tensor_parallel_size,
        quantization=None if model.quantization is None else str(model.quantization),
        extra={
            **_of_model(vllm_config),
            **_of_cache(vllm_config, kv_cache_config),
            "draft": _draft(vllm_config, named.get("draft")),
            "environment": _environment(),
            "packages": {name: _version(name) for name in _PACKAGES},
        },
    )


def _of_model(vllm_config: Any) -> dict[str, Any]:
    model, load = vllm_config.model_config, vllm_config.load_config
    config, text = described(model.hf_config), described(model.hf_text_config)
    return {
        "config": config,
        "text_config": None if text == config else text,
        "model": counted("model", model),
        "inputs": counted("inputs", model.multimodal_config),
        "max_model_len": _max_model_len(model),
        # Of all that sets how tokens are drawn, this alone reaches the model (Llama 4).
        "generation": plain(model.override_generation_config.get("attn_temperature_tuning")),
        "load": [plain(load.load_format), plain(load.model_loader_extra_config or None)],
    }


def _of_cache(vllm_config: Any, kv_cache_config: Any) -> dict[str, Any]:
    return {
        "cache": counted("cache", vllm_config.cache_config),
        "attention": counted("attention", vllm_config.attention_config),
        "mamba": plain(vllm_config.mamba_config),
        "groups": [plain(group) for group in kv_cache_config.kv_cache_groups],
        # The order of pages in a slot; strides and offsets are of the pool.
        "pages": [list(tensor.layers) for tensor in kv_cache_config.kv_cache_tensors],
        "kv_tp_replicas": kv_cache_config.kv_tp_replicas,
        "tokens_per_hash": kv_cache_config.hash_block_size,
    }


def _layout(kv_cache_config: Any, chunk_bytes: int, chunk_tokens: int) -> KVLayout:
    """Opaque bytes, as elements of the KV's own size, so that a codec finds its byte planes."""
    dtype = _common_dtype(list(_layer_specs(kv_cache_config)))
    token_bytes = math.ceil(chunk_bytes / chunk_tokens)
    return KVLayout(
        num_layers=1,
        kv_factor=1,
        num_kv_heads=1,
        head_dim=math.ceil(token_bytes / ITEMSIZES[dtype]),
        dtype=dtype,
        chunk_tokens=chunk_tokens,
    )


def _revision(
    vllm_config: Any, model: Any, weights_id: str | None, weights_cache: Path | None
) -> str:
    load_format = str(vllm_config.load_config.load_format)
    if load_format == "dummy":
        return f"random, seed {model.seed}"
    if weights_id is not None:
        return f"id {weights_id}"
    if load_format not in _FILE_FORMATS or model.model_weights:
        raise ValueError(
            f"weights of load_format {load_format!r} come from elsewhere than the model's own "
            "files: set weights_id in kv_connector_extra_config to a name that changes when they do"
        )
    # With a configuration from somewhere else, its commit is not that of the weights.
    commit = None if model.hf_config_path else getattr(model.hf_config, "_commit_hash", None)
    return weights_revision(model.model, model.revision, commit, weights_cache)


def _draft_model(vllm_config: Any) -> Any | None:
    """Of speculative decoding: its layers have KV in the same blocks as the target's."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in _NO_DRAFT_MODEL:
        return None
    return speculative.draft_model_config


def _draft(vllm_config: Any, revision: str | None) -> dict[str, Any] | None:
    model = _draft_model(vllm_config)
    if model is None:
        return None
    speculative = vllm_config.speculative_config
    return {
        "method": plain(speculative.method),
        "num_speculative_tokens": speculative.num_speculative_tokens,
        "config": described(model.hf_config),
        "model": counted("model", model),
        "revision": revision,
    }


def _max_model_len(model: Any) -> int | None:
    """The longest request, for models that compute otherwise when it is another.

    LongRoPE picks its factors by it, and Llama 4 its attention temperature. Dynamic NTK goes by
    the model's configuration in vLLM 0.32, yet by the length wherever a model passes it on.
    """
    text = json.dumps([described(model.hf_config), described(model.hf_text_config)])
    depends = re.search(r'"(rope_type|type)": "(longrope|su|dynamic)"|"llama4', text)
    return model.max_model_len if depends else None


def _device() -> str:
    """What kernels run on: KV of other devices differs in the order of its bytes, not only in
    rounding. The index and the name a vendor gives a size of memory do not matter."""
    kind = str(current_platform.device_name)
    if current_platform.is_cpu():
        # vLLM picks the layout inside a block by instruction set.
        amx = "+AMX" if torch.cpu._is_amx_tile_supported() else ""
        return f"{kind} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}{amx}"
    capability = current_platform.get_device_capability()
    if capability is None:
        return f"{kind} {current_platform.get_device_name()}"
    return f"{kind} {capability.as_version_str()}"


def _environment() -> dict[str, Any]:
    """Variables that are set and that vLLM holds to matter for what it compiles."""
    return {
        name: plain(value)
        for name, value in envs.compile_factors().items()
        if name in os.environ and not _PLACEMENT.search(name)
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _layer_specs(kv_cache_config: Any) -> Iterator[Any]:
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        yield from getattr(spec, "kv_cache_specs", {}).values() or [spec]


def _common_dtype(specs: Sequence[Any]) -> str:
    """Of all layers' KV; bytes where they differ or hold what has no name of its own."""
    names = {str(getattr(spec, "dtype", None)).removeprefix("torch.") for spec in specs}
    name = names.pop() if len(names) == 1 else ""
    return name if name in ITEMSIZES else "uint8"
