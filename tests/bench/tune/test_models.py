import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootcellar.bench.tune.model_config import LayerKind
from rootcellar.bench.tune.models import ModelShape, kv_shape
from rootcellar.bench.tune.presets import PRESETS

KIB = 1024
LLAMA = dict(PRESETS["llama-3.1-8b"])
HYBRID = dict(PRESETS["qwen3-next-80b-a3b"])

SLIDING: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "sliding_window": 8,
}
"""2 heads of 16 for K and V in 2 bytes: 128 bytes per token and layer."""


@pytest.mark.parametrize(
    ("preset", "bytes_per_token", "past_window"),
    [
        ("llama-3.1-8b", 128 * KIB, 128 * KIB),
        ("llama-3.1-70b", 320 * KIB, 320 * KIB),
        ("qwen2.5-7b", 56 * KIB, 56 * KIB),
        ("qwen3-235b-a22b", 188 * KIB, 188 * KIB),
        ("deepseek-v3", 61 * (512 + 64) * 2, 61 * (512 + 64) * 2),
        ("gemma-3-27b", 62 * 8 * KIB, 10 * 8 * KIB),
        ("gpt-oss-120b", 36 * 2 * KIB, 18 * 2 * KIB),
        ("qwen3-next-80b-a3b", 12 * 2 * KIB, 12 * 2 * KIB),
    ],
)
def test_kv_of_a_token_is_known_for_common_models(
    preset: str, bytes_per_token: int, past_window: int
) -> None:
    shape = kv_shape(preset)
    assert shape.bytes_per_token == bytes_per_token
    assert shape.bytes_per_token_past_window == past_window
    assert shape.chunk_bytes() == 256 * bytes_per_token


@pytest.mark.parametrize(("asked", "itemsize"), [("auto", 2), ("bf16", 2), ("fp8", 1)])
def test_the_kv_dtype_may_be_another_than_the_models(asked: str, itemsize: int) -> None:
    shape = kv_shape("llama-3.1-8b", asked)
    assert shape.bytes_per_token == 64 * KIB * itemsize
    assert shape.weight_bytes == kv_shape("llama-3.1-8b").weight_bytes


@pytest.mark.parametrize(
    ("fields", "sliding_layers"),
    [
        ({}, [0, 1, 2, 3]),
        ({"use_sliding_window": False}, []),
        ({"sliding_window": None}, []),
        ({"sliding_window_pattern": 3}, [0, 1, 3]),
        ({"model_type": "gemma2", "head_dim": 16}, [0, 2]),
        ({"model_type": "gemma3_text", "head_dim": 16}, [0, 1, 2, 3]),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 3}, [3]),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, [1, 3]),
    ],
)
def test_layers_with_a_window_are_found_by_what_the_config_says(
    fields: dict[str, Any], sliding_layers: list[int]
) -> None:
    shape = kv_shape(SLIDING | fields)
    assert shape.bytes_per_token == 4 * 128
    assert shape.bytes_per_token_past_window == (4 - len(sliding_layers)) * 128
    windows = {layers.window_tokens for layers in shape.layers}
    assert windows == ({8} if sliding_layers else set()) | (
        {None} if len(sliding_layers) < 4 else set()
    )


def test_a_sequence_keeps_only_the_windows_of_sliding_layers() -> None:
    shape = kv_shape(SLIDING | {"sliding_window_pattern": 2})
    assert shape.sequence_bytes(5) == 5 * 4 * 128
    assert shape.sequence_bytes(100) == 100 * 2 * 128 + 8 * 2 * 128


def test_linear_attention_keeps_a_state_and_no_kv() -> None:
    shape = kv_shape(HYBRID)
    kinds = {layers.kind: layers.num_layers for layers in shape.layers}
    assert kinds == {LayerKind.FULL: 12, LayerKind.STATE: 36}
    convolution = 3 * (2 * 16 * 128 + 32 * 128)
    assert shape.state_bytes == 36 * 2 * (convolution + 32 * 128 * 128)
    assert shape.sequence_bytes(0) == shape.state_bytes
    in_float32 = kv_shape(HYBRID | {"mamba_ssm_dtype": "float32"})
    assert in_float32.state_bytes - shape.state_bytes == 36 * 2 * 32 * 128 * 128


def test_the_text_part_of_a_multimodal_config_is_what_counts() -> None:
    text = {field: value for field, value in LLAMA.items() if field != "torch_dtype"}
    nested = {"torch_dtype": "bfloat16", "hidden_size": 1, "text_config": text}
    assert kv_shape(nested).layers == kv_shape(LLAMA).layers


@pytest.mark.parametrize(
    ("preset", "copies"), [("llama-3.1-8b", 2), ("deepseek-v3", 16), ("qwen3-next-80b-a3b", 8)]
)
def test_heads_that_cannot_be_split_further_are_on_several_gpus(preset: str, copies: int) -> None:
    shape = kv_shape(preset)
    assert shape.copies(1) == 1
    assert shape.copies(16) == copies
    growing = shape.sequence_bytes(1000) - shape.state_bytes
    assert shape.sequence_bytes(1000, 16) == growing * copies + shape.state_bytes


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_the_parameters_that_transformers_builds(preset: str) -> None:
    """On the meta device: nothing is allocated."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    fields = dict(PRESETS[preset])
    fields.pop("quantization_config", None)
    family = preset.split("-")[0]
    types = {"qwen2.5": "qwen2", "glm": "glm4_moe"}
    model_type = fields.pop("model_type", types.get(family, family))
    config = transformers.AutoConfig.for_model(model_type, **fields)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    built = sum(parameter.numel() for parameter in model.parameters())
    assert kv_shape(preset).parameters.total == pytest.approx(built, rel=1e-3)


@pytest.mark.parametrize(
    ("preset", "active"),
    [
        ("mixtral-8x7b", 12.9e9),
        ("qwen3-235b-a22b", 22e9),
        ("deepseek-v3", 37e9),
        ("kimi-k2", 32e9),
        ("glm-4.5", 32e9),
        ("gpt-oss-20b", 3.61e9),
        ("gpt-oss-120b", 5.13e9),
    ],
)
def test_active_parameters_are_those_the_model_cards_name(preset: str, active: float) -> None:
    """The cards count the output head among them."""
    parameters = kv_shape(preset).parameters
    assert parameters.active + parameters.embedding / 2 == pytest.approx(active, rel=0.04)


@pytest.mark.parametrize(
    ("preset", "gib"), [("gpt-oss-20b", 12.8), ("gpt-oss-120b", 60.8), ("llama-3.1-8b", 14.96)]
)
def test_weights_are_as_large_as_the_published_checkpoint(preset: str, gib: float) -> None:
    assert kv_shape(preset).weight_bytes == pytest.approx(gib * 2**30, rel=5e-3)


def test_fp8_weights_leave_the_embedding_in_16_bits() -> None:
    shape = kv_shape("deepseek-v3")
    assert shape.weight_bytes == shape.parameters.total + shape.parameters.embedding
    assert "embedding: 2" in shape.weight_source


def test_a_folder_says_how_large_its_weights_are(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert kv_shape(tmp_path).weight_bytes == kv_shape("llama-3.1-8b").weight_bytes
    (tmp_path / "model.safetensors").write_bytes(b"x" * 123)
    (tmp_path / "consolidated.safetensors").write_bytes(b"the same again")
    shape = kv_shape(str(tmp_path))
    assert (shape.weight_bytes, shape.weight_source) == (123, "size of the checkpoint")
    assert shape.name == tmp_path.name
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 456}}))
    assert kv_shape(tmp_path).weight_bytes == 456
    index.write_text("{}")
    with pytest.raises(ValueError, match=r"index\.json does not say metadata\.total_size"):
        kv_shape(tmp_path)


def test_a_config_file_is_named_by_its_folder_or_its_own_name(tmp_path: Path) -> None:
    for name, expected in (("config.json", tmp_path.name), ("mine.json", "mine")):
        path = tmp_path / name
        path.write_text(json.dumps(LLAMA))
        assert kv_shape(path).name == expected


@pytest.mark.parametrize(
    "field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
)
def test_a_missing_field_is_named(field: str) -> None:
    fields = {name: value for name, value in LLAMA.items() if name != field}
    with pytest.raises(ValueError, match=f"has no {field}"):
        kv_shape(fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": "8"}, "num_key_value_heads is '8'"),
        ({"hidden_size": 4095}, "has no head_dim"),
        ({"model_type": "gemma3_text"}, "has no head_dim"),
        ({"torch_dtype": "int4"}, "torch_dtype is 'int4'"),
        ({"kv_lora_rank": 512}, "has no qk_rope_head_dim"),
        ({"num_experts": 8}, "has no num_experts_per_tok"),
        ({"layer_types": ["full_attention"]}, "layer_types must name all 32"),
        ({"layer_types": ["mamba"] * 32}, "layer_types has 'mamba'"),
        ({"layer_types": ["sliding_attention"] * 32}, "has no sliding_window"),
        ({"compress_ratios": [4]}, "models with compress_ratios cannot be counted"),
        ({"sliding_window": 8, "sliding_window_pattern": "LLG"}, "pattern is 'LLG'"),
        ({"quantization_config": {"quant_method": "other"}}, "quant_method 'other'"),
    ],
)
def test_what_cannot_be_counted_is_refused_by_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kv_shape(LLAMA | fields)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no-such-model.*one of llama-3\.1-8b"):
        kv_shape("no-such-model")
    with pytest.raises(ValueError, match="kv_dtype is 'fp4'"):
        kv_shape("llama-3.1-8b", "fp4")
    with pytest.raises(FileNotFoundError):
        kv_shape(tmp_path)
    for text, message in (("[]", "no JSON object"), ("{", "is not JSON")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            kv_shape(tmp_path)


@given(st.lists(st.integers(0, 300), min_size=3, max_size=3), st.sampled_from([None, 2, 4]))
def test_prefill_attends_to_all_before_within_the_window(
    borders: list[int], pattern: int | None
) -> None:
    start, between, stop = sorted(borders)
    fields = SLIDING | {"sliding_window": 50, "sliding_window_pattern": pattern}
    shape = kv_shape(fields)
    flops = _flops(shape, start, stop)
    assert flops == pytest.approx(_flops(shape, start, between) + _flops(shape, between, stop))
    sliding = 4 if pattern is None else 4 - 4 // pattern
    pairs = sum(
        (4 - sliding) * (p + 0.5) + sliding * min(p + 0.5, 50.0) for p in range(start, stop)
    )
    attention = 4 * 4 * 16 * pairs  # queries by keys and weights by values, in 4 heads of 16
    assert flops == pytest.approx(shape.flops_per_token * (stop - start) + attention, rel=1e-3)


def test_prefill_passes_the_active_experts_and_attends_with_whole_heads() -> None:
    shape = kv_shape("deepseek-v3")
    assert shape.flops_per_token == pytest.approx(2 * 35.7e9, rel=1e-3)
    assert shape.layers[0].flops_per_pair == 61 * 128 * 2 * ((128 + 64) + 128)


def _flops(shape: ModelShape, start: int, stop: int) -> float:
    return float(shape.prefill_flops(np.array([start]), np.array([stop]))[0])


@pytest.mark.parametrize(
    "change",
    [
        {"quantization_config": "x"},
        {"num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": 0},
        {"num_hidden_layers": 10**30},
    ],
)
def test_a_config_of_the_wrong_kind_is_a_value_error(change: dict[str, Any]) -> None:
    config = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 100,
    }
    kv_shape(config)
    with pytest.raises(ValueError, match="config"):
        kv_shape(config | change)
