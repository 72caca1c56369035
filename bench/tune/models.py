"""What a model's KV weighs and what computing it costs: from its config.json, or a preset.

Grouped-query attention keeps K and V of every KV head, multi-head latent attention (DeepSeek-V2)
one latent for all heads, a sliding window only its last tokens, linear attention a constant state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .model_config import LayerKind, ModelConfig, read_config
from .parameters import Parameters, count_parameters
from .presets import PRESETS

KV_DTYPES = {
    "bfloat16": 2,
    "bf16": 2,
    "float16": 2,
    "fp16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
}
"""Bytes per element of the KV dtypes that may be asked for."""

_MODEL_DTYPES = {"bfloat16": 2, "float16": 2, "float32": 2}
"""Engines serve float32 checkpoints in 16 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layers:
    """All layers of one kind.

    window_tokens: how many of the newest tokens a layer attends to, None for all.
    bytes_per_token: of KV, all these layers together; 0 where the kind keeps a constant state.
    flops_per_pair: of attention between one token and one before it, all these layers together.
    """

    kind: LayerKind
    num_layers: int
    window_tokens: int | None
    bytes_per_token: int
    flops_per_pair: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Sizes and costs of one model, all layers together, over all GPUs it runs on.

    kv_dtype: as stored. kv_heads: KV heads of a layer, 1 for a latent.
    state_bytes: of one sequence, whatever its length; no chunk holds them.
    weight_source: where weight_bytes comes from, in words.
    """

    name: str
    kv_dtype: str
    kv_heads: int
    layers: tuple[Layers, ...]
    state_bytes: int
    parameters: Parameters
    weight_bytes: int
    weight_source: str

    @property
    def bytes_per_token(self) -> int:
        """KV of a token inside every window; what the store keeps of it."""
        return sum(layers.bytes_per_token for layers in self.layers)

    @property
    def bytes_per_token_past_window(self) -> int:
        """KV that a running sequence still keeps of a token once no window reaches it."""
        return sum(la.bytes_per_token for la in self.layers if la.window_tokens is None)

    @property
    def flops_per_token(self) -> int:
        """Of prefill, besides attention; the output head runs for one token only: left out."""
        return 2 * self.parameters.active

    def chunk_bytes(self, chunk_tokens: int = 256) -> int:
        return chunk_tokens * self.bytes_per_token

    def sequence_bytes(self, num_tokens: int, gpus: int = 1) -> int:
        """What a running sequence of so many tokens holds in the HBM of all GPUs together."""
        kept = sum(
            la.bytes_per_token * min(num_tokens, la.window_tokens or num_tokens)
            for la in self.layers
        )
        return kept * self.copies(gpus) + self.state_bytes

    def copies(self, gpus: int) -> int:
        """How many GPUs of a tensor-parallel group hold the same KV: heads are not split further,
        and a latent not at all."""
        return max(1, gpus // self.kv_heads)

    def prefill_flops(
        self, start: NDArray[np.int64], stop: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """FLOPs to compute tokens start to stop of each prompt, those before start being there."""
        flops = self.flops_per_token * (stop - start).astype(np.float64)
        for layers in self.layers:
            window = layers.window_tokens
            flops += layers.flops_per_pair * (_pairs(stop, window) - _pairs(start, window))
        return flops


def kv_shape(source: str | Path | Mapping[str, Any], kv_dtype: str = "auto") -> ModelShape:
    """The shape of a preset (by name), of a config.json or the folder it is in, or of its fields.

    kv_dtype: one of KV_DTYPES, or "auto" for the model's own. ValueError names what is missing or
    not known; OSError if the file cannot be read.
    """
    config, folder = _config(source)
    try:
        return _shape(config, folder, kv_dtype)
    except (TypeError, AttributeError, OverflowError, MemoryError, RecursionError) as error:
        raise ValueError(f"{config.name}: no config of a model ({error})") from error


def _shape(config: ModelConfig, folder: Path | None, kv_dtype: str) -> ModelShape:
    model_dtype = str(config.get("torch_dtype", config.get("dtype", "bfloat16")))
    if model_dtype not in _MODEL_DTYPES:
        raise ValueError(f"{config.name}: torch_dtype is {model_dtype!r}, not a dtype known here")
    if kv_dtype != "auto" and kv_dtype not in KV_DTYPES:
        raise ValueError(f"kv_dtype is {kv_dtype!r}, must be one of auto, {', '.join(KV_DTYPES)}")
    itemsize = _MODEL_DTYPES[model_dtype] if kv_dtype == "auto" else KV_DTYPES[kv_dtype]
    parameters = count_parameters(config)
    weight_bytes, weight_source = _weights(config, parameters, folder)
    latent = bool(config.get("kv_lora_rank"))
    heads = config.whole("num_attention_heads")
    return ModelShape(
        name=config.name,
        kv_dtype=model_dtype if kv_dtype == "auto" else kv_dtype,
        kv_heads=1 if latent else config.whole("num_key_value_heads", default=heads),
        layers=tuple(_layers(config, itemsize)),
        state_bytes=_state_bytes(config),
        parameters=parameters,
        weight_bytes=weight_bytes,
        weight_source=weight_source,
    )


def _config(source: str | Path | Mapping[str, Any]) -> tuple[ModelConfig, Path | None]:
    """And the folder that may hold the weights."""
    if isinstance(source, str) and source in PRESETS:
        return ModelConfig(source, PRESETS[source]), None
    if isinstance(source, Mapping):
        return read_config(source), None
    path = Path(source)
    if isinstance(source, str) and not path.exists():
        raise ValueError(
            f"model is {source!r}, must be the path of a config.json or of a model's folder, "
            f"or one of {', '.join(PRESETS)}"
        )
    return read_config(path), path if path.is_dir() else None


def _layers(config: ModelConfig, itemsize: int) -> list[Layers]:
    kinds = config.layer_kinds()
    elements, flops = _per_layer(config)
    result = []
    for kind in LayerKind:
        if not (count := kinds.count(kind)):
            continue
        grows = kind is not LayerKind.STATE
        result.append(
            Layers(
                kind=kind,
                num_layers=count,
                window_tokens=config.whole("sliding_window") if kind is LayerKind.SLIDING else None,
                bytes_per_token=count * elements * itemsize if grows else 0,
                flops_per_pair=count * flops if grows else 0,
            )
        )
    return result


def _per_layer(config: ModelConfig) -> tuple[int, int]:
    """Elements of KV per token, and FLOPs of attention per pair of tokens, of one layer."""
    heads = config.whole("num_attention_heads")
    if config.get("kv_lora_rank"):
        rope, value = config.whole("qk_rope_head_dim"), config.whole("v_head_dim")
        key = config.whole("qk_nope_head_dim") + rope
        return config.whole("kv_lora_rank") + rope, 2 * heads * (key + value)
    width = config.head_dim()
    widths = width + config.whole("v_head_dim", default=width)
    return config.whole("num_key_value_heads", default=heads) * widths, 2 * heads * widths


def _state_bytes(config: ModelConfig) -> int:
    """Of Gated DeltaNet: the last inputs of its convolution, and a matrix per value head."""
    count = config.layer_kinds().count(LayerKind.STATE)
    if not count:
        return 0
    key_width = config.whole("linear_key_head_dim")
    keys = config.whole("linear_num_key_heads") * key_width
    values = config.whole("linear_num_value_heads") * config.whole("linear_value_head_dim")
    inputs = (config.whole("linear_conv_kernel_dim") - 1) * (2 * keys + values)
    matrix_itemsize = 4 if config.get("mamba_ssm_dtype") == "float32" else 2
    return count * (2 * inputs + matrix_itemsize * key_width * values)


def _weights(config: ModelConfig, parameters: Parameters, folder: Path | None) -> tuple[int, str]:
    if folder and (found := _checkpoint_bytes(folder)):
        return found, "size of the checkpoint"
    quantization = config.get("quantization_config", {})
    method = quantization.get("quant_method")
    tables = 2 * parameters.embedding
    matrices = parameters.total - parameters.embedding
    if method is None:
        return tables + 2 * matrices, "parameters, counted from the config, of 2 bytes"
    if method in ("fp8", "fbgemm_fp8"):
        return tables + matrices, "parameters, counted from the config, of 1 byte (embedding: 2)"
    if method == "mxfp4":
        # 32 values of 4 bits share a scale of 8.
        rest = 2 * (matrices - parameters.experts)
        note = "parameters, counted from the config, of 2 bytes (experts: 4.25 bits)"
        return tables + rest + parameters.experts * 17 // 32, note
    raise ValueError(
        f"{config.name}: the weights of quant_method {method!r} cannot be counted from the config; "
        f"give the folder that holds them"
    )


def _checkpoint_bytes(folder: Path) -> int:
    """Of the safetensors that the folder's index counts, or of those in it; 0 if there are none."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sum(path.stat().st_size for path in folder.glob("model*.safetensors"))
    try:
        return int(json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} does not say metadata.total_size") from error


def _pairs(num_tokens: NDArray[np.int64], window: int | None) -> NDArray[np.float64]:
    """Pairs of a token and one it attends to, in a causal prompt of so many tokens."""
    tokens = num_tokens.astype(np.float64)
    if window is None:
        return tokens * tokens / 2
    inside = np.minimum(tokens, window)
    return inside * inside / 2 + (tokens - inside) * window
