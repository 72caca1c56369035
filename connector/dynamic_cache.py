"""A transformers DynamicCache as chunks see it: its layout, made from stored KV, and read back.

transformers keeps keys and values per layer as (1, num_kv_heads, tokens, head_dim); chunks and
pages are (num_layers, 2, tokens, num_kv_heads, head_dim).
"""

import inspect
from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ..tiers.layout import KVLayout
from .unsupported import UnsupportedModelError, check_model

_ROUNDING = 1e-4
"""Relative difference beyond which KV is not the same, where its dtype is not coarser still."""


def cache_argument(model: PreTrainedModel) -> str:
    """The name of the cache among the model's inputs: transformers renamed past_key_values."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def model_layout(model: PreTrainedModel) -> KVLayout:
    """The layout of the KV that `model` really makes, found by running it on a few tokens.

    Raises UnsupportedModelError when that KV is not one key and value of equal shape per token
    and layer, all on one device, or when it depends on later tokens.
    """
    check_model(model)
    cache = _run(model, [0, 1, 2])
    kinds = {_kind_of(layer) for layer in cache.layers}
    if len(kinds) != 1 or (kind := kinds.pop()) is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be cached: its layers do not all keep one key and one "
            f"value of the same shape and dtype per token on one device"
        )
    _, num_kv_heads, num_tokens, head_dim = kind[0]
    layout = KVLayout(
        num_layers=len(cache.layers),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=str(kind[1]).removeprefix("torch."),
    )
    # Equal lengths run equal kernels: between these two only the last token's KV may differ.
    before = torch.empty(2, *layout.shape(num_tokens - 1), dtype=kind[1], device=kind[2])
    for out, held in zip(before, (cache, _run(model, [0, 1, 3])), strict=True):
        read_tokens(held, 0, num_tokens - 1, out)
    one, other = before.float()
    rounding = max(_ROUNDING, torch.finfo(kind[1]).eps)
    if (one - other).norm() > rounding * one.norm():
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be cached: a token's KV depends on the tokens after it"
        )
    return layout


def append_tokens(cache: DynamicCache, parts: Sequence[torch.Tensor], device: torch.device) -> None:
    """Append the tokens of `parts`, in order; the parts may be released afterwards.

    A part is (num_layers, 2, tokens, num_kv_heads, head_dim) on any device; `device` is the
    model's.
    """
    for layer in range(len(parts[0]) if parts else 0):
        keys, values = (
            torch.cat([_as_heads(part[layer, factor], device) for part in parts], dim=-2)
            for factor in range(2)
        )
        cache.update(keys, values, layer)


def read_tokens(cache: DynamicCache, start: int, stop: int, out: torch.Tensor) -> None:
    """Copy the KV of tokens [start, stop) into `out` (num_layers, 2, stop - start, ...)."""
    for layer, held in enumerate(cache.layers):
        assert isinstance(held, DynamicLayer)
        for factor, states in enumerate((held.keys, held.values)):
            assert states is not None
            out[layer, factor].copy_(states[0, :, start:stop].transpose(0, 1))


def _as_heads(tokens: torch.Tensor, device: torch.device) -> torch.Tensor:
    """(tokens, num_kv_heads, head_dim) -> (1, num_kv_heads, tokens, head_dim), a view if it can."""
    return tokens.to(device).transpose(0, 1)[None]


def _run(model: PreTrainedModel, tokens: list[int]) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        input_ids = torch.tensor([tokens], device=model.device)
        model(input_ids, use_cache=True, **{cache_argument(model): cache})
    return cache


def _kind_of(layer: object) -> tuple[torch.Size, torch.dtype, torch.device] | None:
    """Shape, dtype and device that a probed layer's keys and values share; None if they do not."""
    if type(layer) is not DynamicLayer or layer.keys is None or layer.values is None:
        return None
    kinds = {(states.shape, states.dtype, states.device) for states in (layer.keys, layer.values)}
    kind = kinds.pop()
    return None if kinds or kind[0][:1] != (1,) else kind
