"""What CachedModel refuses, and why: models and requests whose KV it could not serve rightly.

Both checks run before anything changes. What they do not know they refuse: a model input that is
passed over in silence could change KV without changing the tokens it is filed under.
"""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ..tiers.keys import MAX_TOKEN

_GENERATE_ARGUMENTS = frozenset(
    {
        "attention_mask",
        "generation_config",
        "logits_processor",
        "negative_prompt_attention_mask",
        "negative_prompt_ids",
        "prefix_allowed_tokens_fn",
        "stopping_criteria",
        "streamer",
        "tokenizer",
    }
)
"""Arguments of generate, beside those of GenerationConfig, that leave the prompt's KV as it is."""

_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
_PLAIN_DECODING = ("greedy_search", "sample")


class UnsupportedModelError(ValueError):
    """The model's KV cannot be kept per token and reused; the message says why."""


class UnsupportedRequestError(ValueError):
    """This call of generate cannot be served from a cache; the message says why."""


def check_model(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError unless every layer keeps one key and value per token.

    Cheap enough for every request: adapters, training mode and autocast come and go.
    """
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        kind = type(model).__name__
        raise UnsupportedModelError(f"{kind} cannot be cached: it is no causal language model")
    for why in _model_faults(model):
        raise UnsupportedModelError(f"{type(model).__name__} cannot be cached: {why}")


def check_request(
    model: PreTrainedModel, input_ids: torch.Tensor, arguments: Mapping[str, Any]
) -> None:
    """Raise unless `arguments` ask for plain decoding of one unpadded prompt.

    input_ids: integers, (1, tokens), at least one token. UnsupportedRequestError says what cannot
    be served; TypeError and ValueError are for an input_ids that is no prompt at all.
    """
    _check_prompt(input_ids)
    for why in _request_faults(model, input_ids, arguments):
        raise UnsupportedRequestError(f"generate cannot be served from the cache: {why}")


def cache_argument(model: PreTrainedModel) -> str:
    """The name of the cache among the model's inputs: transformers renamed past_key_values."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _model_faults(model: Any) -> Iterator[str]:
    config = model.config
    if config.is_encoder_decoder:
        yield "it is an encoder-decoder, whose KV also depends on the encoder's input"
    if getattr(model, "_is_stateful", False) or not model._supports_default_dynamic_cache():
        yield "it carries a recurrent state, which no prefix of its tokens can be cut from"
    if getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config"):
        yield "PEFT adapters are loaded; merge them into the weights first"
    if model.training:
        yield "it is in training mode, where dropout makes KV random; call model.eval()"
    if torch.is_autocast_enabled(model.device.type):
        yield "autocast is on, so KV has another precision than the weights; load it in that dtype"
    if (getattr(model, "tp_size", None) or 1) > 1:
        yield "it is split over devices by tensor parallelism"
    text_config = config.get_text_config(decoder=True)
    if getattr(text_config, "use_bidirectional_attention", False):
        yield "its attention looks ahead, so a token's KV depends on the tokens after it"
    for rope_type in _LENGTH_DEPENDENT_ROPE & set(_rope_types(text_config)):
        yield f"with {rope_type!r} RoPE scaling a token's KV depends on the length of its prompt"
    for index, layer in enumerate(DynamicCache(config=config).layers):
        if type(layer) is not DynamicLayer:
            yield f"layer {index} is not full attention (transformers caches it as {layer!r})"


def _rope_types(text_config: Any) -> Iterator[str]:
    """RoPE types by any of transformers' names: rope_parameters may be nested per layer type."""
    for name in ("rope_parameters", "rope_scaling"):
        settings = getattr(text_config, name, None)
        if isinstance(settings, Mapping):
            named = cast("Mapping[str, object]", settings)
            for scope in (named, *named.values()):
                if isinstance(scope, Mapping):
                    kinds = cast("Mapping[str, object]", scope)
                    yield str(kinds.get("rope_type", kinds.get("type")))


def _check_prompt(input_ids: torch.Tensor) -> None:
    if not isinstance(input_ids, torch.Tensor):
        raise TypeError(f"input_ids is a {type(input_ids).__name__}, must be a torch.Tensor")
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"input_ids has dtype {input_ids.dtype}, must be int64 or int32")
    if input_ids.dim() != 2 or input_ids.shape[0] != 1:
        shape = tuple(input_ids.shape)
        raise UnsupportedRequestError(f"input_ids has shape {shape}, must be one prompt: (1, n)")
    if input_ids.shape[1] == 0:
        raise ValueError("input_ids is empty, must hold at least one token")
    outside = (input_ids < 0) | (input_ids > MAX_TOKEN)
    if bool(outside.any()):
        at = int(outside[0].int().argmax())
        raise ValueError(f"token {at} is {int(input_ids[0, at])}, must be from 0 to {MAX_TOKEN}")


def _request_faults(
    model: Any, input_ids: torch.Tensor, arguments: Mapping[str, Any]
) -> Iterator[str]:
    given = {name: value for name, value in arguments.items() if value is not None}
    settings = {name: value for name, value in given.items() if name not in _GENERATE_ARGUMENTS}
    if settings.pop("assistant_model", None) is not None:
        yield "assistant_model rewrites the cache while it decodes"
    prepared, inputs = model._prepare_generation_config(given.get("generation_config"), **settings)
    yield from _decoding_faults(prepared)
    if prepared.prefill_chunk_size is not None and cache_argument(model) != "cache":
        yield "prefill_chunk_size: this transformers computes all pieces anew, whatever is cached"
    for name in inputs:
        yield f"{name} may change KV in ways that the tokens do not tell"
    mask = given.get("attention_mask")
    if mask is None:
        if _would_be_masked(input_ids, prepared.pad_token_id, prepared.eos_token_id):
            yield (
                f"the prompt holds the pad token {prepared.pad_token_id}, which transformers takes "
                "for padding; pass an attention_mask of ones if it is not"
            )
    elif mask.shape != input_ids.shape or not bool((mask == 1).all()):
        yield "attention_mask must be ones of the shape of input_ids; the prompt must be unpadded"


def _decoding_faults(prepared: Any) -> Iterator[str]:
    """What in a complete GenerationConfig is more than plain decoding over a DynamicCache."""
    mode = prepared.get_generation_mode().value
    if mode not in _PLAIN_DECODING:
        yield f"decoding by {mode} is not one sequence that grows token by token"
    if (prepared.num_return_sequences or 1) > 1:
        yield f"num_return_sequences is {prepared.num_return_sequences}, must be 1"
    if not prepared.use_cache:
        yield "use_cache is off"
    if prepared.cache_implementation is not None:
        yield f"cache_implementation is {prepared.cache_implementation!r}; leave it out"
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(prepared, name, False):
            yield f"{name} asks for prompt tokens that would not be computed"
    if getattr(prepared, "token_healing", False):
        yield "token_healing changes the prompt"


def _would_be_masked(
    input_ids: torch.Tensor, pad_token_id: int | None, eos_token_id: int | list[int] | None
) -> bool:
    """Whether generate, given no attention_mask, takes some of the prompt for padding."""
    eos = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
    if pad_token_id is None or pad_token_id in eos:
        return False
    return bool((input_ids == pad_token_id).any())
