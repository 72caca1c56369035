"""Chunks cut from a cache and put together again are the cache."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BertConfig,
    BertLMHeadModel,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    PreTrainedModel,
)

from rootcellar.connector.arriving_cache import ArrivingKV
from rootcellar.connector.copies import copy_pages
from rootcellar.connector.dynamic_cache import cache_pages, model_layout
from rootcellar.connector.unsupported import UnsupportedModelError
from rootcellar.kernels import PagedKV
from rootcellar.tiers.layout import KVLayout

MakeModel = Callable[..., PreTrainedModel]

NUM_TOKENS = 640


def _forward(model: PreTrainedModel, tokens: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(tokens, cache=cache, use_cache=True).logits
    return logits


def _cut(cache: DynamicCache, layout: KVLayout, start: int, stop: int) -> torch.Tensor:
    out = torch.empty(layout.shape(stop - start), dtype=getattr(torch, layout.dtype))
    numbers = np.arange(start, stop)
    pages = PagedKV.of_slots(out)
    copy_pages(cache_pages(cache), numbers, pages, numbers - start, at_once=100)
    return out


def _append(kv: ArrivingKV, part: torch.Tensor) -> None:
    num_tokens = part.shape[2]
    numbers = np.arange(num_tokens)
    pages = PagedKV.of_slots(part)
    copy_pages(pages, numbers, kv.pages, kv.num_tokens + numbers, at_once=100)
    kv.extend(num_tokens)


def test_the_layout_is_what_the_model_makes(make_model: MakeModel, family: str) -> None:
    heads = 1 if family == "multi-query" else 2
    expected = KVLayout(num_layers=2, num_kv_heads=heads, head_dim=16, dtype="float32")
    assert model_layout(make_model(family)) == expected


def test_the_layout_follows_the_dtype_of_the_model(make_model: MakeModel) -> None:
    assert model_layout(_cast(make_model(), torch.bfloat16)).dtype == "bfloat16"


def test_a_model_that_looks_ahead_is_refused() -> None:
    small: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 50,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        ahead = BertLMHeadModel(BertConfig(**small))
        causal = BertLMHeadModel(BertConfig(**small, is_decoder=True))
    with pytest.raises(UnsupportedModelError, match="depends on the tokens after it"):
        model_layout(ahead.train(False))
    assert model_layout(causal.train(False)).num_layers == 2


def test_keys_and_values_of_different_shapes_are_refused() -> None:
    config = DeepseekV3Config(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        first_k_dense_replace=1,
        kv_lora_rank=12,
        q_lora_rank=8,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
    )
    with pytest.raises(UnsupportedModelError, match="one key and one value of the same shape"):
        model_layout(DeepseekV3ForCausalLM(config).train(False))


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    torch.nn.Module.to(model, dtype)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("split", [1, 16, 100, 256, 333, 512, 639])
def test_logits_after_a_restored_prefix_are_equal_bit_for_bit(
    make_model: MakeModel, family: str, split: int, dtype: torch.dtype
) -> None:
    model = _cast(make_model(family), dtype)
    layout = model_layout(model)
    tokens = torch.randint(0, 100, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(1))
    uninterrupted = DynamicCache(config=model.config)
    _forward(model, tokens[:, :split], uninterrupted)

    stops = [*range(0, split, 256), split]
    parts = [_cut(uninterrupted, layout, start, stop) for start, stop in pairwise(stops)]
    kv = ArrivingKV(layout, NUM_TOKENS, model.device)
    for part in parts:
        _append(kv, part)
        part.fill_(float("nan"))
    restored = kv.cache(model.config)

    assert restored.get_seq_length() == split
    expected = _forward(model, tokens[:, split:], uninterrupted)
    assert torch.equal(_forward(model, tokens[:, split:], restored), expected)


def test_logits_are_close_to_those_of_one_prefill(make_model: MakeModel, family: str) -> None:
    model = make_model(family)
    tokens = torch.randint(0, 100, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(2))
    whole = DynamicCache(config=model.config)
    logits = _forward(model, tokens, whole)
    for split in (7, 256, 500):
        kv = ArrivingKV(model_layout(model), NUM_TOKENS, model.device)
        _append(kv, _cut(whole, model_layout(model), 0, split))
        close = _forward(model, tokens[:, split:], kv.cache(model.config))
        torch.testing.assert_close(close, logits[:, split:], atol=1e-4, rtol=1e-4)
