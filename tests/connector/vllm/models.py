"""Tiny random models and adapters on disk, as vLLM loads them: one set of bytes per seed."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

VOCAB = 512
HIDDEN = 128
LAYERS = 2
HEADS = 4
HEAD_DIM = 32
"""The least that vLLM's CPU backend takes."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 192,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 16384,
    # Weights this wide make a token of noise depend on every token before it.
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}

SLIDING: dict[str, Any] = {
    "num_hidden_layers": 4,
    "sliding_window": 300,
}

FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    # Every layer slides.
    "mistral": (MistralForCausalLM, MistralConfig, SLIDING),
    # Three layers slide and one sees everything: two cache groups.
    "gemma": (Gemma3ForCausalLM, Gemma3TextConfig, SLIDING | {"sliding_window_pattern": 4}),
}


def save_model(path: Path, family: str = "llama", seed: int = 0, **sizes: Any) -> Path:
    """Write a model of a family of FAMILIES with a word-level tokenizer; returns `path`."""
    model_class, config_class, special = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**(SIZES | special | sizes)))
    model.save_pretrained(path)
    _save_tokenizer(path)
    return path


def save_adapter(path: Path, seed: int, rank: int = 8) -> Path:
    """Write a LoRA adapter for the llama family's query and value projections, in PEFT's format."""
    path.mkdir(exist_ok=True)
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": None,
        "r": rank,
        "lora_alpha": 4 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
        "task_type": "CAUSAL_LM",
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for name, rows in (("q_proj", HEADS * HEAD_DIM), ("v_proj", 2 * HEAD_DIM)):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, HIDDEN, generator=draw)
            tensors[f"{stem}.lora_B.weight"] = torch.randn(rows, rank, generator=draw)
    save_file(tensors, path / "adapter_model.safetensors")
    return path


def _save_tokenizer(path: Path) -> None:
    """`vllm serve` wants a tokenizer even where every prompt is token ids."""
    words = {"<unk>": 0, "<s>": 1} | {f"w{i}": i for i in range(2, VOCAB)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast: Any = PreTrainedTokenizerFast  # its __init__ has no types
    fast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>").save_pretrained(path)
