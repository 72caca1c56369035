"""The model of the demo: a small random Llama over bytes, or one from a path."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from .demo_workload import MAX_PROMPT_TOKENS, Encode

NEW_TOKENS = 12

_SEED = 0
_END_OF_TURN = 256
_VOCABULARY = 260


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoModel:
    """A model with the way into its tokens, and the longest prompt the demo gives it."""

    model: Any
    encode: Encode
    max_prompt_tokens: int
    name: str

    def arguments(self, prompt: torch.Tensor) -> dict[str, Any]:
        """Arguments of generate for a greedy reply to `prompt`, in which no token is padding."""
        settings = self.model.generation_config
        eos = settings.eos_token_id
        pad = settings.pad_token_id
        return {
            "attention_mask": torch.ones_like(prompt),
            "max_new_tokens": NEW_TOKENS,
            "do_sample": False,
            "pad_token_id": pad if pad is not None else eos[0] if isinstance(eos, list) else eos,
        }


def load_model(path: str | None) -> DemoModel:
    """The model at `path` with its tokenizer, or, without a path, the demo's own."""
    return _own_model() if path is None else _model_from(path)


def _own_model() -> DemoModel:
    """Weights from a fixed seed: every process that makes it makes the same."""
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=2 * MAX_PROMPT_TOKENS,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model = LlamaForCausalLM(config)
    model.train(False)
    return DemoModel(
        model=model,
        encode=lambda text: [*text.encode(), _END_OF_TURN],
        max_prompt_tokens=MAX_PROMPT_TOKENS,
        name=f"random Llama, {model.num_parameters() / 1e6:.0f}M parameters, float32",
    )


def _model_from(path: str) -> DemoModel:
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    if torch.cuda.is_available():
        model = model.to("cuda")
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    room = (positions or 2 * MAX_PROMPT_TOKENS) - NEW_TOKENS
    return DemoModel(
        model=model,
        encode=lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
        max_prompt_tokens=min(room, MAX_PROMPT_TOKENS),
        name=path,
    )
