"""Engines share KV exactly if each would have computed the other's, in this process or the next."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import AttentionConfig, CacheConfig, ModelConfig, VllmConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec

from rootcellar.connector.vllm import identity
from rootcellar.connector.vllm.counted import UNCOUNTED, Part, plain
from rootcellar.connector.vllm.supported import UnsupportedVllmError
from rootcellar.tiers.layout import ITEMSIZES, Namespace

from .engine_configs import LAYERS, SPEC, cache, engine, namespace
from .models import save_model

IN_ANOTHER_PROCESS = """
import sys
from pathlib import Path
sys.path.append(sys.argv[1])
from engine_configs import engine, namespace
print(namespace(engine(Path(sys.argv[2]))).digest.hex())
"""


@pytest.fixture(scope="module")
def base(llama: Path) -> Namespace:
    return namespace(engine(llama))


@pytest.fixture(scope="module")
def untouched(llama: Path) -> VllmConfig:
    return engine(llama)


@pytest.fixture
def copied(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "copied"))


# What makes no difference ----------------------------------------------------------------------


def test_another_process_and_another_place_make_no_difference(
    base: Namespace, copied: Path, tmp_path: Path
) -> None:
    answer = subprocess.run(
        [sys.executable, "-P", "-c", IN_ANOTHER_PROCESS, str(Path(__file__).parent), str(copied)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7", "TMPDIR": str(tmp_path), "VLLM_PORT": "9123"},
    )
    assert answer.stdout.split()[-1] == base.digest.hex()


UNIMPORTANT: dict[str, dict[str, Any]] = {
    "a name for the model": {"served_model_name": "my-model"},
    "CUDA graphs": {"enforce_eager": False},
    "the longest request": {"max_model_len": 2048},
    "where text is made": {"tokenizer_mode": "slow", "max_logprobs": 3},
    "the seed of sampling": {"seed": 11},
    "batches": {"max_num_seqs": 3, "max_num_batched_tokens": 512},
    "the engine's own cache": {"enable_prefix_caching": False},
    "the memory of the cache": {"kv_cache_memory_bytes": 1 << 28},
    "adapters, which are in the keys": {"enable_lora": True},
    "guesses without a model": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 2,
            "prompt_lookup_max": 3,
        }
    },
    "how weights are read": {"load_format": "auto", "use_tqdm_on_load": False},
}


@pytest.mark.parametrize("what", UNIMPORTANT)
def test_what_computes_no_kv_makes_no_difference(base: Namespace, llama: Path, what: str) -> None:
    assert namespace(engine(llama, **UNIMPORTANT[what])) == base


def test_the_size_of_the_pool_makes_no_difference(base: Namespace, llama: Path) -> None:
    assert namespace(engine(llama), cache(num_blocks=7)) == base


def test_bookkeeping_in_the_models_configuration_makes_no_difference(
    base: Namespace, copied: Path
) -> None:
    _edit_config(copied, transformers_version="5.0.0", _name_or_path="/elsewhere")
    assert namespace(engine(copied)) == base


# What does -------------------------------------------------------------------------------------


def _edit_config(model: Path, **changes: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


ROPE = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}

IMPORTANT: dict[str, dict[str, Any]] = {
    "dtype": {"dtype": "float16"},
    "dtype of the cache": {"kv_cache_dtype": "fp8"},
    "RoPE scaling": {"hf_overrides": {"rope_parameters": ROPE}},
    "RoPE base": {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}},
    "positions": {"hf_overrides": {"max_position_embeddings": 8192}},
    "an epsilon": {"hf_overrides": {"rms_norm_eps": 1e-5}},
    "a sliding window": {"hf_overrides": {"sliding_window": 64}},
    "the model's code": {"trust_remote_code": True},
    "attention": {"attention_config": {"backend": "CPU_ATTN"}},
    "random weights": {"load_format": "dummy"},
}


@pytest.mark.parametrize("what", IMPORTANT)
def test_what_computes_kv_makes_a_difference(base: Namespace, llama: Path, what: str) -> None:
    assert namespace(engine(llama, **IMPORTANT[what])) != base


def test_no_two_of_those_are_taken_for_each_other(base: Namespace, llama: Path) -> None:
    digests = {namespace(engine(llama, **arguments)).digest for arguments in IMPORTANT.values()}
    assert len(digests) == len(IMPORTANT)


def test_other_weights_under_the_same_name_make_a_difference(
    base: Namespace, tmp_path: Path
) -> None:
    assert namespace(engine(save_model(tmp_path / "llama", seed=1))) != base


def test_a_changed_configuration_file_makes_a_difference(base: Namespace, copied: Path) -> None:
    _edit_config(copied, rope_parameters=ROPE)
    assert namespace(engine(copied)) != base


SPECS: dict[str, dict[str, Any]] = {
    "blocks": {"block_size": 256},
    "heads": {"num_kv_heads": 1},
    "size of a head": {"head_size": 64},
    "dtype": {"dtype": torch.float16},
    "window": {"sliding_window": 1024},
    "padding": {"page_size_padded": 1 << 20},
    "alignment": {"block_stride_alignment": MultipleOf(64)},
    "another alignment": {"block_stride_alignment": MultipleOf(32)},
    "order": {"layout": "LBNHC"},
}


def test_the_layout_of_the_cache_makes_a_difference(base: Namespace, llama: Path) -> None:
    config = engine(llama)
    digests = {namespace(config, cache(**spec)).digest for spec in SPECS.values()}
    assert len(digests | {base.digest}) == len(SPECS) + 1


def test_groups_and_the_order_of_layers_make_a_difference(base: Namespace, llama: Path) -> None:
    config, split, reordered = engine(llama), cache(), cache()
    window = SlidingWindowSpec(**SPEC, sliding_window=1024)
    split.kv_cache_groups = [
        KVCacheGroupSpec(LAYERS[:1], FullAttentionSpec(**SPEC)),
        KVCacheGroupSpec(LAYERS[1:], window),
    ]
    reordered.kv_cache_tensors[0].layers = LAYERS[::-1]
    digests = {namespace(config, changed).digest for changed in (split, reordered)}
    assert len(digests | {base.digest}) == 3


def test_the_number_of_ranks_makes_a_difference(base: Namespace, llama: Path) -> None:
    assert namespace(engine(llama, tensor_parallel_size=2)) != base


def test_the_size_of_a_chunk_makes_a_difference(base: Namespace, llama: Path) -> None:
    config = engine(llama)
    assert namespace(config, chunk_bytes=1 << 17, chunk_tokens=512) != base
    # What ranks hold alike is stored once, in a smaller slot.
    assert namespace(config, chunk_bytes=1 << 15) != base


@pytest.mark.parametrize("rope", ["longrope", "dynamic"])
def test_the_longest_request_counts_where_rope_depends_on_it(copied: Path, rope: str) -> None:
    factors = [1.0] * 16
    parameters = {
        "rope_type": rope,
        "factor": 2.0,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 4096,
        "short_factor": factors,
        "long_factor": factors,
    }
    _edit_config(copied, rope_parameters=parameters)
    short, long = (namespace(engine(copied, max_model_len=n)) for n in (2048, 8192))
    assert short != long


def test_variables_that_choose_kernels_count_and_those_that_place_things_do_not(
    base: Namespace, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VLLM_DP_RANK", "VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_LOG_BATCHSIZE_INTERVAL"):
        monkeypatch.setenv(name, "3")
    assert namespace(engine(llama)) == base
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert namespace(engine(llama)) != base


def test_another_machine_makes_a_difference(
    base: Namespace, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engine(llama)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert namespace(config) != base
    monkeypatch.undo()
    monkeypatch.setattr(identity, "installed_version", lambda: "0.32.1")
    assert namespace(config) != base


# Draft models ----------------------------------------------------------------------------------


def test_a_draft_model_counts_with_its_weights(
    base: Namespace, llama: Path, tmp_path: Path
) -> None:
    drafts = [save_model(tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    drafts.append(Path(shutil.copytree(drafts[1], tmp_path / "again")))
    first, second, again = (
        namespace(
            engine(
                llama,
                speculative_config={
                    "method": "draft_model",
                    "model": str(draft),
                    "num_speculative_tokens": 2,
                },
            )
        )
        for draft in drafts
    )
    assert len({base.digest, first.digest, second.digest}) == 3
    assert again == second


# Names of weights ------------------------------------------------------------------------------


def test_weights_that_do_not_outlive_the_process_need_no_name(copied: Path) -> None:
    config = engine(copied)
    for file in copied.glob("*.safetensors"):
        file.unlink()
    assert namespace(config, durable=False).revision == identity.NAMELESS


def test_random_weights_are_named_by_their_seed(llama: Path) -> None:
    one, two = (namespace(engine(llama, load_format="dummy", seed=n)) for n in (1, 2))
    assert one != two


def test_a_name_by_the_user_stands_for_the_files(llama: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", seed=1)
    first, second = (namespace(engine(m), weights_id="mine") for m in (llama, other))
    assert first == second
    assert namespace(engine(llama), weights_id="yours") != first


@pytest.mark.parametrize("load_format", ["tensorizer", "modelexpress", "ipc_cache", "my_loader"])
def test_weights_from_elsewhere_need_a_name_by_the_user(llama: Path, load_format: str) -> None:
    config = engine(llama)
    config.load_config.load_format = load_format
    with pytest.raises(ValueError, match=f"{load_format!r} come from elsewhere.*set weights_id"):
        namespace(config)
    assert namespace(config, weights_id="mine").revision == "id mine"


def test_a_bucket_is_not_its_local_copy_of_the_configuration(llama: Path) -> None:
    config = engine(llama)
    config.model_config.model_weights = "s3://bucket/model"
    with pytest.raises(ValueError, match="set weights_id"):
        namespace(config)


def test_a_commit_counts_only_where_the_weights_are_from_there_too(llama: Path) -> None:
    config, commit = engine(llama), "0123456789abcdef0123456789abcdef01234567"
    config.model_config.model = "org/name"
    config.model_config.hf_config._commit_hash = commit
    assert namespace(config).revision == f"commit {commit}"
    config.model_config.hf_config_path = "org/other"
    with pytest.raises(ValueError, match="set weights_id"):
        namespace(config)


def test_weight_files_are_remembered_where_it_is_told_to(llama: Path, tmp_path: Path) -> None:
    namespace(engine(llama), weights_cache=tmp_path / "weights.json")
    assert "model.safetensors" in (tmp_path / "weights.json").read_text()


# What it is made of ----------------------------------------------------------------------------


def test_a_layer_that_looks_ahead_has_no_namespace(llama: Path) -> None:
    with pytest.raises(UnsupportedVllmError, match="not causal"):
        namespace(engine(llama), cache(non_causal=True))


@given(
    chunk_bytes=st.integers(1, 1 << 34),
    chunk_tokens=st.integers(1, 8192),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn]),
)
def test_a_slot_holds_the_bytes_of_all_ranks(
    untouched: VllmConfig, chunk_bytes: int, chunk_tokens: int, dtype: torch.dtype
) -> None:
    layout = namespace(
        untouched,
        cache(dtype=dtype),
        chunk_bytes=chunk_bytes,
        chunk_tokens=chunk_tokens,
        durable=False,
    ).layout
    assert layout.chunk_tokens == chunk_tokens
    assert chunk_bytes <= layout.chunk_bytes < chunk_bytes + chunk_tokens * layout.itemsize


def test_kv_of_unlike_or_nameless_types_is_bytes(llama: Path) -> None:
    config, mixed = engine(llama), cache()
    other = FullAttentionSpec(**SPEC | {"dtype": torch.float32})
    mixed.kv_cache_groups.append(KVCacheGroupSpec(["x"], other))
    assert namespace(config, mixed).layout.dtype == "uint8"
    assert namespace(config, cache(dtype=torch.int16)).layout.dtype == "uint8"
    assert namespace(config).layout.dtype == "bfloat16"
    assert "int16" not in ITEMSIZES


PARTS: dict[Part, Any] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "attention": AttentionConfig,
    "inputs": MultiModalConfig,
}

DESCRIBED_APART = {"hf_config", "hf_text_config", "override_generation_config", "multimodal_config"}


@pytest.mark.parametrize("part", PARTS)
def test_what_does_not_count_is_still_called_that_in_vllm(part: Part) -> None:
    assert UNCOUNTED[part] <= {field.name for field in dataclasses.fields(PARTS[part])}


@pytest.mark.parametrize("part", PARTS)
def test_every_setting_counts_but_those_listed(llama: Path, part: Part) -> None:
    config = engine(llama)
    config.model_config.multimodal_config = MultiModalConfig()
    owners = {
        "model": config.model_config,
        "cache": config.cache_config,
        "attention": config.attention_config,
        "inputs": config.model_config.multimodal_config,
    }
    before = namespace(config, durable=False)
    for field in dataclasses.fields(PARTS[part]):
        if field.name not in DESCRIBED_APART:
            value = getattr(owners[part], field.name)
            object.__setattr__(owners[part], field.name, "another")
            after = namespace(config, durable=False)
            object.__setattr__(owners[part], field.name, value)
            assert (after == before) == (field.name in UNCOUNTED[part]), field.name
    assert namespace(config, durable=False) == before


def test_no_address_of_an_object_gets_in(base: Namespace) -> None:
    assert not re.search(r"0x[0-9a-f]{6,}", json.dumps(base.describe()))


class _Colour(Enum):
    RED = 1


class _Text(str):
    pass


class _Opaque:
    def __init__(self, value: int) -> None:
        self.value = value


VALUES: list[tuple[Any, Any]] = [
    (None, None),
    (True, True),
    (_Text("a"), "a"),
    (1.5, 1.5),
    (float("nan"), "nan"),
    (_Colour.RED, "_Colour.RED"),
    (torch.bfloat16, "torch.bfloat16"),
    (Fraction(1, 3), "1/3"),
    (Path("/a"), "/a"),
    ({3: (1, 2)}, {"3": [1, 2]}),
    ({"b", "a"}, ["a", "b"]),
    (MultipleOf(3), {"": "MultipleOf", "base": 3}),
    (_Opaque(4), {"": "_Opaque", "value": 4}),
    (len, "builtins.len"),
    (Path, "pathlib.Path"),
]


@pytest.mark.parametrize(("value", "expected"), VALUES, ids=range(len(VALUES)))
def test_whatever_a_configuration_holds_is_written_by_its_value(value: Any, expected: Any) -> None:
    written = plain(value)
    assert written == expected
    assert type(written) is type(expected)
    json.dumps(written, allow_nan=False)
