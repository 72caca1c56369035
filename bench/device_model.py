"""The model of the device check: a random Llama, the same in every process, and its prompt."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from .demo_model import DemoModel
from .device_pages import CHUNK_TOKENS
from .device_section import Site

_TAIL_TOKENS = 40
"""Of the prompt, behind its last chunk: always computed."""
_SPARE_TOKENS = 64
"""Room for what is generated."""

_auto: Any = AutoModelForCausalLM  # which has no types


def random_llama(site: Site) -> DemoModel:
    """Weights from the site's seed, made on its device; bfloat16 on a GPU."""
    shape = site.scale.model
    num_tokens = len(prompt_of(site)[0])
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=num_tokens + _SPARE_TOKENS,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=None,
    )
    dtype = torch.bfloat16 if site.on_gpu else torch.float32
    devices = [site.device] if site.on_gpu else []
    with torch.random.fork_rng(devices=devices), site.device:
        torch.manual_seed(site.seed)
        model = _auto.from_config(config, dtype=dtype)
    model.train(False)
    return DemoModel(
        model=model,
        encode=lambda text: list(text.encode()),
        max_prompt_tokens=num_tokens,
        name="random Llama",
    )


def prompt_of(site: Site) -> torch.Tensor:
    """(1, tokens): prompt_chunks whole chunks and a short tail."""
    shape = (1, site.scale.prompt_chunks * CHUNK_TOKENS + _TAIL_TOKENS)
    generator = site.generator()
    return torch.randint(
        site.scale.model.vocabulary, shape, device=site.device, generator=generator
    )
