import copy
import dataclasses
import enum
import math
import os
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rootcellar.tiers.layout import ITEMSIZES, KVLayout, Namespace

LLAMA_8B = KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")
FIELDS: dict[str, Any] = {
    "model": "meta-llama/Llama-3.1-8B",
    "revision": "0e9e39f249a16976918f6564b8830bc894c89659",
    "layout": LLAMA_8B,
    "rope": {"rope_type": "llama3", "factor": 8.0, "long": [1, 2.5, None, True, "ü"]},
    "backend": "flash_attn",
    "tp_rank": 1,
    "tp_size": 2,
    "sliding_window": 4096,
    "quantization": "fp8",
    "kv_scales": "ab12",
    "extra": {"nested": {"a": {}, "b": []}},
}
GOLDEN = "399429fdc933f8b6d7aa0b1d13fc5fcaccb5c96e6791eb2c866c060032d22a57"

SCALARS = (
    st.sampled_from([None, True, False, 0, 1, 0.0, -0.0, 1.0, "", "0", "1", "null", "\ud800"])
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
)
NAMES = st.text('ab"', max_size=2)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


def make(**changes: Any) -> Namespace:
    return Namespace(**(FIELDS | changes))


def exactly_equal(a: Any, b: Any) -> bool:
    """Equal in value and in every type on the way down, and 0.0 apart from -0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(exactly_equal(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(exactly_equal, a, b))
    return repr(a) == repr(b)


def test_bytes_per_token_and_chunk_follow_from_the_fields() -> None:
    assert LLAMA_8B.itemsize == 2
    assert LLAMA_8B.bytes_per_token == 128 * 1024
    assert LLAMA_8B.chunk_bytes == 32 * 1024 * 1024
    assert LLAMA_8B.shape(100) == (32, 2, 100, 8, 128)
    mqa = dataclasses.replace(LLAMA_8B, num_kv_heads=1)
    assert mqa.bytes_per_token == LLAMA_8B.bytes_per_token // 8


def test_a_latent_cache_has_one_factor_and_one_head() -> None:
    mla = KVLayout(num_layers=61, num_kv_heads=1, head_dim=512 + 64, dtype="bfloat16", kv_factor=1)
    assert mla.shape(256) == (61, 1, 256, 1, 576)
    assert mla.bytes_per_token == 61 * 576 * 2


@pytest.mark.parametrize("name", ITEMSIZES)
def test_sizes_and_names_of_dtypes_are_those_of_torch(name: str) -> None:
    dtype = getattr(torch, name)
    layout = KVLayout(num_layers=2, num_kv_heads=3, head_dim=5, dtype=dtype)
    assert layout.dtype == name
    assert layout == dataclasses.replace(layout, dtype=name)
    kv = torch.empty(layout.shape(layout.chunk_tokens), dtype=dtype)
    assert kv.numel() * kv.element_size() == layout.chunk_bytes


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_layers", 0),
        ("num_kv_heads", -1),
        ("head_dim", 1.0),
        ("chunk_tokens", True),
        ("kv_factor", 3),
        ("kv_factor", True),
        ("dtype", "int4"),
        ("dtype", torch.int64),
        ("dtype", None),
    ],
)
def test_a_wrong_layout_field_is_named_with_its_value(name: str, value: object) -> None:
    changes: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=rf"^{name} is .*{value}.*, must be "):
        dataclasses.replace(LLAMA_8B, **changes)


def test_shape_refuses_a_negative_number_of_tokens() -> None:
    with pytest.raises(ValueError, match="num_tokens is -1"):
        LLAMA_8B.shape(-1)


def test_the_digest_never_changes() -> None:
    assert make().digest.hex() == GOLDEN


def test_the_digest_is_the_same_in_another_process_with_another_hash_seed() -> None:
    source = (
        "import sys, pickle; ns = pickle.loads(sys.stdin.buffer.read())\n"
        "from rootcellar.tiers.layout import Namespace\n"
        "fields = {k: getattr(ns, k) for k in ns.describe()}\n"
        "fields['rope'] = dict(reversed(list(fields['rope'].items())))\n"
        "print(Namespace(**fields).digest.hex())"
    )
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", source],
            input=pickle.dumps(make()),
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONSAFEPATH": "1"},
            capture_output=True,
            check=True,
        )
        assert done.stdout.decode().strip() == GOLDEN


def test_equal_fields_make_equal_namespaces_whatever_their_order_and_containers() -> None:
    rope = dict(reversed(FIELDS["rope"].items())) | {"long": tuple(FIELDS["rope"]["long"])}
    other = make(rope=rope)
    assert other == make()
    assert hash(other) == hash(make())


CHANGES = [
    ("model", "meta-llama/Llama-3.1-8b"),
    ("revision", "0e9e39f249a16976918f6564b8830bc894c8965"),
    ("layout", dataclasses.replace(LLAMA_8B, dtype="float16")),
    ("layout", dataclasses.replace(LLAMA_8B, num_layers=8, num_kv_heads=32)),
    ("layout", dataclasses.replace(LLAMA_8B, kv_factor=1)),
    ("layout", dataclasses.replace(LLAMA_8B, head_dim=64)),
    ("layout", dataclasses.replace(LLAMA_8B, chunk_tokens=128)),
    ("rope", {}),
    ("rope", FIELDS["rope"] | {"factor": 8}),
    ("rope", FIELDS["rope"] | {"factor": "8.0"}),
    ("rope", FIELDS["rope"] | {"more": None}),
    ("rope", FIELDS["rope"] | {"long": [1.0, 2.5, None, True, "ü"]}),
    ("rope", FIELDS["rope"] | {"long": [True, 2.5, None, 1, "ü"]}),
    ("rope", FIELDS["rope"] | {"long": [1, 2.5, None, True, "u\u0308"]}),
    ("backend", ""),
    ("tp_rank", 0),
    ("tp_size", 4),
    ("sliding_window", None),
    ("sliding_window", 4095),
    ("quantization", None),
    ("quantization", ""),
    ("kv_scales", None),
    ("kv_scales", "ab1"),
    ("extra", {"nested": {"a": [], "b": {}}}),
    ("extra", {"nested": {"a": {}}, "b": []}),
]


def test_a_change_in_any_field_changes_the_digest() -> None:
    assert {name for name, _ in CHANGES} == set(FIELDS)
    digests = {make(**{name: value}).digest for name, value in CHANGES} | {make().digest}
    assert len(digests) == len(CHANGES) + 1


@given(VALUES, VALUES)
def test_values_have_equal_digests_exactly_if_they_are_the_same_json(a: Any, b: Any) -> None:
    same = make(extra={"x": a}).digest == make(extra={"x": b}).digest
    assert same == exactly_equal(a, b)


@given(
    st.lists(st.tuples(st.sampled_from(["model", "revision", "backend"]), st.text()), max_size=3)
)
def test_text_cannot_move_from_one_field_to_the_next(moves: list[tuple[str, str]]) -> None:
    changes = dict(moves)
    fields = {name: FIELDS[name] for name in ("model", "revision", "backend")} | changes
    if not fields["model"] or not fields["revision"]:
        return
    differs = any(fields[name] != FIELDS[name] for name in changes)
    assert (make(**changes).digest != make().digest) == differs


def test_lone_surrogates_are_not_the_character_they_would_pair_to() -> None:
    assert make(model="\ud800\udc00").digest != make(model="\U00010000").digest


def test_a_later_change_of_what_was_passed_in_changes_nothing() -> None:
    rope: dict[str, Any] = {"factor": 8.0, "long": [1.0], "inner": {"a": 1}}
    ns = make(rope=rope)
    before = ns.describe()
    rope["factor"] = 4.0
    rope["long"].append(2.0)
    rope["inner"]["a"] = 2
    assert ns.describe() == before
    with pytest.raises(TypeError):
        ns.rope["factor"] = 4.0  # type: ignore[index]  # pyright: ignore[reportIndexIssue] read-only


def test_a_namespace_survives_pickling_copying_and_replacing() -> None:
    ns = make()
    copies = [pickle.loads(pickle.dumps(ns)), copy.deepcopy(ns), dataclasses.replace(ns)]
    assert [c.describe() for c in copies] == [ns.describe()] * 3
    assert set(copies) == {ns}
    assert make(**ns.describe() | {"layout": ns.layout}) == ns


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope": {"a": {"b": [0, {1, 2}]}}}, r"rope\.a\.b\[1\] is \{1, 2\} \(set\)"),
        ({"rope": {"a": {1: 2}}}, r"rope\.a has the key 1, must be a str"),
        ({"extra": {"dtype": torch.float32}}, r"extra\.dtype is torch\.float32"),
        ({"extra": {"b": b""}}, r"extra\.b is b'' \(bytes\)"),
        ({"extra": {"c": Colour.RED}}, r"extra\.c is .* \(Colour\)"),
        ({"rope": None}, "rope is None, must be a mapping"),
        ({"model": None}, "model is None, must be a str"),
        ({"kv_scales": b"ab"}, "kv_scales is b'ab', must be a str"),
        ({"layout": None}, "layout is None, must be a KVLayout"),
    ],
)
def test_what_is_not_json_is_refused_by_path(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope": {"factor": math.nan}}, r"rope\.factor is nan, must be finite"),
        ({"rope": {"factor": [-math.inf]}}, r"rope\.factor\[0\] is -inf, must be finite"),
        ({"revision": ""}, "revision is empty"),
        ({"model": ""}, "model is empty"),
        ({"tp_rank": 2}, "tp_rank is 2, must be below tp_size, 2"),
        ({"tp_rank": -1}, "tp_rank is -1"),
        ({"tp_size": True}, "tp_size is True"),
        ({"sliding_window": 0}, "sliding_window is 0"),
    ],
)
def test_values_out_of_range_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**changes)
