"""Reading a model's config.json: fields by name, and which layers keep what kind of KV.

The rules are those of the engines and of transformers' configuration classes, where a field that
is left out has a default that depends on the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

_TEXT_PARTS = ("text_config", "llm_config", "language_config")

_NOT_COUNTED = (
    "attention_chunk_size",
    "attn_layer_period",
    "block_configs",
    "compress_ratios",
    "cross_attention_layers",
    "global_head_dim",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "index_head_dim",
    "layers_block_type",
    "linear_attn_config",
    "num_kv_shared_layers",
    "sparse_attention_config",
)
"""Fields of architectures whose KV differs from what is counted here: refused, never guessed."""

_OWN_HEAD_DIM = ("gemma", "gpt_oss", "qwen3")
"""Model types whose heads are not hidden_size / num_attention_heads wide."""

_SLIDING_PERIOD = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2}
"""Every so many-th layer is full, where the config names neither layer_types nor a pattern."""


class LayerKind(StrEnum):
    FULL = "full attention"
    SLIDING = "sliding window"
    STATE = "constant state"
    """Linear attention: a state of fixed size per sequence, no KV per token."""


_KINDS = {
    "full_attention": LayerKind.FULL,
    "sliding_attention": LayerKind.SLIDING,
    "linear_attention": LayerKind.STATE,
}


class ModelConfig:
    """The fields of one config.json, for a multimodal model with those of its text part on top.

    Errors are ValueError and name the model, the field and what is wrong with it.
    """

    def __init__(self, name: str, fields: Mapping[str, Any]) -> None:
        self.name = name
        parts = [fields[part] for part in _TEXT_PARTS if isinstance(fields.get(part), Mapping)]
        self._fields = {**fields, **(parts[0] if parts else {})}
        for field in _NOT_COUNTED:
            if self._fields.get(field):
                raise ValueError(f"{name}: the KV of models with {field} cannot be counted")

    def get(self, field: str, default: Any = None) -> Any:
        value = self._fields.get(field)
        return default if value is None else value

    def whole(self, *names: str, default: int | None = None) -> int:
        """The first of `names` that is there, a whole number of at least 1."""
        for field in names:
            if (value := self.get(field)) is not None:
                if type(value) is not int or value < 1:
                    raise ValueError(
                        f"{self.name}: {field} is {value!r}, must be a whole number of at least 1"
                    )
                return value
        if default is None:
            raise ValueError(f"{self.name}: its config has no {' or '.join(names)}")
        return default

    def head_dim(self) -> int:
        needed = str(self.get("model_type", "")).startswith(_OWN_HEAD_DIM)
        if needed or self.get("head_dim") is not None:
            return self.whole("head_dim")
        hidden, heads = self.whole("hidden_size"), self.whole("num_attention_heads")
        if hidden % heads:
            raise ValueError(
                f"{self.name}: its config has no head_dim, and num_attention_heads, {heads}, "
                f"does not divide hidden_size, {hidden}"
            )
        return hidden // heads

    def layer_kinds(self) -> list[LayerKind]:
        """The kind of each layer, first layer first."""
        count = self.whole("num_hidden_layers")
        if (types := self.get("layer_types")) is not None:
            return self._named_kinds(types, count)
        if self.get("full_attention_interval"):
            return _every(self.whole("full_attention_interval"), count, LayerKind.STATE)
        if not self.get("sliding_window") or not self.get("use_sliding_window", True):
            return [LayerKind.FULL] * count
        model_type = self.get("model_type", "")
        if model_type in _SLIDING_PERIOD or self.get("sliding_window_pattern"):
            period = self.whole("sliding_window_pattern", default=_SLIDING_PERIOD.get(model_type))
            return _every(period, count, LayerKind.SLIDING)
        full = min(count, self.whole("max_window_layers")) if "qwen" in model_type else 0
        return [LayerKind.FULL] * full + [LayerKind.SLIDING] * (count - full)

    def _named_kinds(self, types: Any, count: int) -> list[LayerKind]:
        if not isinstance(types, list) or len(types) != count:
            raise ValueError(f"{self.name}: layer_types must name all {count} num_hidden_layers")
        if unknown := next((t for t in types if t not in _KINDS), None):
            raise ValueError(f"{self.name}: layer_types has {unknown!r}, can count {[*_KINDS]}")
        return [_KINDS[t] for t in types]


def read_config(source: Mapping[str, Any] | Path) -> ModelConfig:
    """From the fields themselves, a config.json, or the folder it lies in."""
    if isinstance(source, Mapping):
        return ModelConfig(str(source.get("_name_or_path") or "config"), source)
    path = source / "config.json" if source.is_dir() else source
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} is not a model's config: it holds no JSON object")
    named = path.resolve()
    return ModelConfig(named.parent.name if named.name == "config.json" else named.stem, fields)


def _every(period: int, count: int, between: LayerKind) -> list[LayerKind]:
    """Each period-th layer is full attention, those between are not."""
    return [LayerKind.FULL if (i + 1) % period == 0 else between for i in range(count)]
