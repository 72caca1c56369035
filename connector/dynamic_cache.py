"""A transformers DynamicCache as chunks see it: the layout of its KV, and its pages.

transformers keeps keys and values per layer as (1, num_kv_heads, tokens, head_dim); chunks and
pages are (num_layers, 2, tokens, num_kv_heads, head_dim).
"""

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ..kernels import PagedKV
from ..tiers.layout import KVLayout
from .unsupported import UnsupportedModelError, cache_argument, check_model

_ROUNDING = 1e-4
"""Relative difference beyond which KV is not the same, where its dtype is not coarser still."""


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
    _, num_kv_heads, _, head_dim = kind[0]
    layout = KVLayout(
        num_layers=len(cache.layers),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=str(kind[1]).removeprefix("torch."),
    )
    # Equal lengths run equal kernels: between these two only the last token's KV may differ.
    one, other = (
        torch.cat([states[..., :-1, :] for layer in held.layers for states in _states(layer)])
        for held in (cache, _run(model, [0, 1, 3]))
    )
    rounding = max(_ROUNDING, torch.finfo(kind[1]).eps)
    if (one.float() - other.float()).norm() > rounding * one.float().norm():
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be cached: a token's KV depends on the tokens after it"
        )
    return layout


def cache_pages(cache: DynamicCache) -> PagedKV:
    """The cache's own keys and values, a page per token; good until the cache changes."""
    return PagedKV.of_heads([_states(layer) for layer in cache.layers])


def _run(model: PreTrainedModel, tokens: list[int]) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        input_ids = torch.tensor([tokens], device=model.device)
        model(input_ids, use_cache=True, **{cache_argument(model): cache})
    return cache


def _states(layer: object) -> tuple[torch.Tensor, torch.Tensor]:
    assert isinstance(layer, DynamicLayer)
    assert layer.keys is not None
    assert layer.values is not None
    return layer.keys, layer.values


def _kind_of(layer: object) -> tuple[torch.Size, torch.dtype, torch.device] | None:
    """Shape, dtype and device that a probed layer's keys and values share; None if they do not."""
    if type(layer) is not DynamicLayer or layer.keys is None or layer.values is None:
        return None
    kinds = {(states.shape, states.dtype, states.device) for states in (layer.keys, layer.values)}
    kind = kinds.pop()
    return None if kinds or kind[0][:1] != (1,) else kind
