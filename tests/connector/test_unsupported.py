"""Every refusal names its reason, and comes before anything changes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GenerationConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from rootcellar.connector import unsupported
from rootcellar.connector.unsupported import (
    UnsupportedModelError,
    UnsupportedRequestError,
    check_model,
    check_request,
)

MakeModel = Callable[..., PreTrainedModel]
Settings: Any = GenerationConfig  # its constructor has no annotations

PROMPT = torch.arange(1, 9)[None]
TINY: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def _refused(model: Any, why: str) -> None:
    with pytest.raises(UnsupportedModelError, match=why):
        check_model(model.eval())


def test_every_family_of_full_attention_is_served(make_model: MakeModel, family: str) -> None:
    check_model(make_model(family))


def test_a_sliding_window_is_refused(make_model: MakeModel) -> None:
    _refused(make_model("mistral", sliding_window=64), r"layer 0 is not full attention \(.*Sliding")
    _refused(Gemma2ForCausalLM(Gemma2Config(**TINY)), "layer 0 is not full attention")


def test_a_hybrid_is_refused() -> None:
    config = Lfm2Config(**TINY, layer_types=["full_attention", "conv"])
    _refused(Lfm2ForCausalLM(config), "layer 1 is not full attention")


def test_a_recurrent_model_is_refused() -> None:
    config = MambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, state_size=4)
    _refused(MambaForCausalLM(config), "recurrent state")


def test_an_encoder_decoder_is_refused() -> None:
    config = T5Config(vocab_size=50, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2)
    _refused(T5ForConditionalGeneration(config), "encoder-decoder")


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_length_is_refused(make_model: MakeModel, rope_type: str) -> None:
    rope = {"rope_type": rope_type, "factor": 2.0, "rope_theta": 10000.0}
    if rope_type == "longrope":
        rope |= {
            "original_max_position_embeddings": 2048,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
        }
    _refused(make_model(rope_parameters=rope), f"{rope_type}.*length of its prompt")


def test_a_model_in_training_is_refused(make_model: MakeModel) -> None:
    with pytest.raises(UnsupportedModelError, match="training mode"):
        check_model(make_model().train())


def test_autocast_is_refused(make_model: MakeModel) -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UnsupportedModelError, match="autoc"):
        check_model(make_model())


def test_adapters_are_refused(make_model: MakeModel) -> None:
    adapted: Any = make_model()
    adapted.peft_config = {"default": object()}
    _refused(adapted, "PEFT")


ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"num_beams": 2}, "beam_search"),
    ({"do_sample": True, "num_return_sequences": 2}, "num_return_sequences is 2"),
    ({"assistant_model": object()}, "assistant_model"),
    ({"prompt_lookup_num_tokens": 3}, "assisted"),
    ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive"),
    ({"use_cache": False}, "use_cache is off"),
    ({"cache_implementation": "static"}, "cache_implementation is 'static'"),
    ({"cache_implementation": "quantized"}, "cache_implementation is 'quantized'"),
    ({"output_hidden_states": True}, "output_hidden_states"),
    ({"output_attentions": True}, "output_attentions"),
    ({"token_healing": True}, "token_healing"),
    ({"generation_config": Settings(num_beams=3)}, "beam_search"),
    ({"cache": object()}, "cache may change KV"),
    ({"past_key_values": object()}, "past_key_values may change KV"),
    ({"inputs_embeds": torch.zeros(1, 8, 64)}, "inputs_embeds may change KV"),
    ({"position_ids": PROMPT}, "position_ids may change KV"),
    ({"token_type_ids": PROMPT}, "token_type_ids may change KV"),
    ({"pixel_values": torch.zeros(1, 3, 4, 4)}, "pixel_values may change KV"),
    ({"anything": torch.zeros(1)}, "anything may change KV"),
    ({"custom_generate": "someone/repo"}, "custom_generate may change KV"),
    ({"attention_mask": torch.tensor([[0] + [1] * 7])}, "must be unpadded"),
    ({"attention_mask": torch.ones((1, 7))}, "ones of the shape of input_ids"),
    ({"pad_token_id": 5}, "holds the pad token 5"),
]


@pytest.mark.parametrize(("arguments", "why"), ARGUMENTS)
def test_a_request_beyond_plain_decoding_is_refused(
    make_model: MakeModel, arguments: dict[str, Any], why: str
) -> None:
    with pytest.raises(UnsupportedRequestError, match=why):
        check_request(make_model(), PROMPT, arguments)


def test_a_prompt_in_pieces_is_refused_where_transformers_forgets_what_is_cached(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, arguments = make_model(), {"prefill_chunk_size": 64}
    check_request(model, PROMPT, arguments)
    monkeypatch.setattr(unsupported, "cache_argument", lambda _: "past_key_values")
    with pytest.raises(UnsupportedRequestError, match="prefill_chunk_size"):
        check_request(model, PROMPT, arguments)


def test_settings_of_the_model_itself_count(make_model: MakeModel) -> None:
    model = make_model()
    assert model.generation_config is not None
    model.generation_config.num_beams = 2
    with pytest.raises(UnsupportedRequestError, match="beam_search"):
        check_request(model, PROMPT, {})
    check_request(model, PROMPT, {"num_beams": 1})


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"do_sample": True, "temperature": 0.5, "top_k": 3, "max_new_tokens": 4},
        {"attention_mask": torch.ones_like(PROMPT), "pad_token_id": 5},
        {"pad_token_id": 5, "eos_token_id": [5, 6]},
        {"position_ids": None, "cache": None, "streamer": None},
        {"generation_config": Settings(max_new_tokens=3), "stopping_criteria": []},
        {"output_scores": True, "return_dict_in_generate": True, "repetition_penalty": 1.1},
    ],
)
def test_plain_decoding_is_served(make_model: MakeModel, arguments: dict[str, Any]) -> None:
    check_request(make_model(), PROMPT, arguments)


@pytest.mark.parametrize(
    ("prompt", "error", "why"),
    [
        ([[1, 2]], TypeError, "input_ids is a list"),
        (torch.ones((1, 3)), TypeError, r"dtype torch\.float32"),
        (torch.ones(3, dtype=torch.long), UnsupportedRequestError, r"shape \(3,\)"),
        (torch.ones((2, 3), dtype=torch.long), UnsupportedRequestError, r"shape \(2, 3\)"),
        (torch.ones((1, 0), dtype=torch.long), ValueError, "is empty"),
        (torch.tensor([[3, -1]]), ValueError, "token 1 is -1"),
        (torch.tensor([[2**31]]), ValueError, "token 0 is 2147483648"),
    ],
)
def test_what_is_no_single_prompt_is_refused(
    make_model: MakeModel, prompt: Any, error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        check_request(make_model(), prompt, {})
