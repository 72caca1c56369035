import array
import hashlib
import itertools
import struct
import tracemalloc
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rootcellar.tiers.keys import MAX_TOKEN, chunk_keys, extend_keys
from rootcellar.tiers.layout import KVLayout, Namespace

CHUNK = 4
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, dtype="uint8", chunk_tokens=CHUNK)
NS = Namespace(model="m", revision="r", layout=LAYOUT)
FULL = Namespace(
    model="m",
    revision="r",
    layout=KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, dtype="uint8"),
)

TOKENS = st.lists(st.integers(0, MAX_TOKEN) | st.integers(0, 3), max_size=5 * CHUNK)
NAMES = st.none() | st.text(max_size=4) | st.binary(max_size=4)
Name = str | bytes | None


def frame(value: Name) -> bytes:
    if value is None:
        return b"\x00"
    content = value.encode() if isinstance(value, str) else value
    return (
        (b"\x01" if isinstance(value, str) else b"\x02") + struct.pack("<Q", len(content)) + content
    )


def slow_keys(
    tokens: list[int], ns: Namespace, adapter: Name, salt: Name, tail: bool
) -> list[bytes]:
    """The definition, token by token."""
    parts = b"rootcellar keys 1\n" + ns.digest + frame(adapter) + frame(salt)
    key, keys = hashlib.sha256(parts).digest(), []
    for start in range(0, len(tokens), ns.layout.chunk_tokens):
        chunk = tokens[start : start + ns.layout.chunk_tokens]
        if len(chunk) < ns.layout.chunk_tokens and not tail:
            break
        raw = b"".join(token.to_bytes(4, "little") for token in chunk)
        key = hashlib.sha256(key + raw).digest()
        keys.append(key)
    return keys


@given(TOKENS, NAMES, NAMES, st.booleans())
def test_keys_are_what_the_definition_says(
    tokens: list[int], adapter: Name, salt: Name, tail: bool
) -> None:
    keys = chunk_keys(tokens, NS, adapter=adapter, salt=salt, tail=tail)
    assert keys == slow_keys(tokens, NS, adapter, salt, tail)
    assert all(type(key) is bytes and len(key) == 32 for key in keys)


def test_keys_never_change() -> None:
    first, last = chunk_keys(range(300), FULL, adapter="lora", salt=b"tenant", tail=True)
    assert first.hex() == "55210abbd1118b593357048d6dfb6646f5aada524e227ea7560250e04ef8999e"
    assert last.hex() == "88d2b1fb52e239a702accb5757156841f5d2c118f9d4acddee4c880349cdae33"


FORMS: dict[str, Any] = {
    "tuple": tuple,
    "range": lambda tokens: range(len(tokens)),
    "deque": deque,
    "array.array": lambda tokens: array.array("i", tokens),
    "memoryview": lambda tokens: np.array(tokens, np.int32).data,
    "int32": lambda tokens: np.array(tokens, np.int32),
    "big endian": lambda tokens: np.array(tokens, ">i4"),
    "int64": lambda tokens: np.array(tokens, np.int64),
    "uint64": lambda tokens: np.array(tokens, np.uint64),
    "uint16": lambda tokens: np.array(tokens, np.uint16),
    "strided": lambda tokens: np.repeat(np.array(tokens, np.int32), 2)[::2],
    "read-only": lambda tokens: np.frombuffer(np.array(tokens, np.int32).tobytes(), np.int32),
    "torch int64": lambda tokens: torch.tensor(tokens, dtype=torch.int64),
    "torch int32": lambda tokens: torch.tensor(tokens, dtype=torch.int32),
    "numpy integers": lambda tokens: [np.int64(token) for token in tokens],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 1000])
def test_every_form_of_the_same_tokens_has_the_same_keys(form: str, count: int) -> None:
    tokens = list(range(count))
    for tail in (False, True):
        assert chunk_keys(FORMS[form](tokens), FULL, tail=tail) == chunk_keys(
            tokens, FULL, tail=tail
        )


def test_an_int32_array_is_read_where_it_lies() -> None:
    tokens = np.zeros(2**20, np.int32)
    tracemalloc.start()
    chunk_keys(tokens, FULL)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < tokens.nbytes // 2


@given(TOKENS, TOKENS)
def test_keys_agree_exactly_as_far_as_whole_chunks_of_tokens_do(a: list[int], b: list[int]) -> None:
    pairs = zip(a, b, strict=False)
    shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    chunks = shared // CHUNK
    keys_a, keys_b = chunk_keys(a, NS), chunk_keys(b, NS)
    assert keys_a[:chunks] == keys_b[:chunks]
    assert not set(keys_a[chunks:]) & set(keys_b[chunks:])


@given(TOKENS)
def test_a_tail_key_follows_the_full_keys_and_is_none_of_them(tokens: list[int]) -> None:
    full, tailed = chunk_keys(tokens, NS), chunk_keys(tokens, NS, tail=True)
    assert tailed[: len(full)] == full
    assert len(tailed) == -(-len(tokens) // CHUNK)
    padded = [tokens + [0] * n for n in range(1, CHUNK)]
    others = {key for more in padded for key in chunk_keys(more, NS)} - set(full)
    assert not others & set(tailed[len(full) :])


@given(st.lists(st.tuples(NAMES, NAMES), min_size=2, max_size=6, unique_by=repr))
def test_no_two_pairs_of_adapter_and_salt_share_a_key(pairs: list[tuple[Name, Name]]) -> None:
    tokens = list(range(3 * CHUNK + 1))
    chains = [chunk_keys(tokens, NS, adapter=a, salt=s, tail=True) for a, s in pairs]
    keys = [key for chain in chains for key in chain]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("b", "a"), ("a", "b")),
        (("b", "a"), ("", "ba")),
        ((None, "ab"), ("", "ab")),
        (("a", None), ("a", "")),
        (("a", "b"), (b"a", "b")),
        ((b"\x02" + bytes(8), None), (b"", b"")),
        ((b"a\x02" + struct.pack("<Q", 1) + b"b", None), (b"a", b"b")),
        ((None, b"\0"), (b"\0", None)),
        (("\ud800\udc00", None), ("\U00010000", None)),
    ],
)
def test_crafted_names_do_not_collide(one: tuple[Name, Name], other: tuple[Name, Name]) -> None:
    (a, s), (b, t) = one, other
    tokens = list(range(CHUNK))
    assert chunk_keys(tokens, NS, adapter=a, salt=s) != chunk_keys(tokens, NS, adapter=b, salt=t)


def test_another_namespace_shares_no_key() -> None:
    other = Namespace(model="m", revision="s", layout=LAYOUT)
    assert not set(chunk_keys(range(12), NS)) & set(chunk_keys(range(12), other))


@given(TOKENS, st.integers(0, 5), NAMES, st.booleans(), st.booleans())
def test_extending_gives_the_keys_of_the_whole(
    tokens: list[int], known: int, salt: Name, tail: bool, as_array: bool
) -> None:
    whole = chunk_keys(tokens, NS, salt=salt, tail=tail)
    known = min(known, len(tokens) // CHUNK)
    form = np.array(tokens, np.int32) if as_array else tokens
    assert extend_keys(whole[:known], form, NS, salt=salt, tail=tail) == whole


def test_extending_hashes_nothing_again() -> None:
    """Keys that are given are taken on trust, and so are the tokens they cover."""
    given_keys = [bytes([i]) * 32 for i in range(2)]
    tokens: list[Any] = ["never looked at"] * (2 * CHUNK) + [1] * CHUNK
    keys = extend_keys(given_keys, tokens, NS)
    assert keys[:2] == given_keys
    raw = struct.pack(f"<{CHUNK}i", *[1] * CHUNK)
    assert keys[2] == hashlib.sha256(given_keys[1] + raw).digest()


def test_extending_with_more_keys_than_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="keys cover 4 tokens, must be at most the 3 given"):
        extend_keys([bytes(32)], [1, 2, 3], NS)


@pytest.mark.parametrize("form", [list, tuple, np.array, torch.tensor])
@pytest.mark.parametrize("bad", [-1, MAX_TOKEN + 1, 2**40, -(2**40)])
@pytest.mark.parametrize("at", [0, 5, 9])
def test_an_id_outside_int32_is_named_with_its_position(form: Any, bad: int, at: int) -> None:
    tokens = [1] * 10
    tokens[at] = bad
    with pytest.raises(ValueError, match=rf"^token {at} is {bad}, must be from 0 to {MAX_TOKEN}$"):
        chunk_keys(form(tokens), NS, tail=True)
    with pytest.raises(ValueError, match=rf"^token {at} is {bad},"):
        extend_keys([bytes(32)] * (at // CHUNK), form(tokens), NS, tail=True)


@pytest.mark.parametrize("bad", [1.0, "1", None, [1]])
@pytest.mark.parametrize("at", [0, 9])
def test_an_id_that_is_no_integer_is_named_with_its_position(bad: Any, at: int) -> None:
    tokens: list[Any] = [1] * 10
    tokens[at] = bad
    with pytest.raises(TypeError, match=rf"^token {at} is .*, must be an integer$"):
        chunk_keys(tokens, NS, tail=True)


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        (np.ones(8), TypeError, "dtype float64, must be integers"),
        (np.ones(8, bool), TypeError, "dtype bool, must be integers"),
        (torch.ones(8), TypeError, "dtype float32, must be integers"),
        (np.ones(8).data, TypeError, "dtype float64, must be integers"),
        ("text", TypeError, "token 0 is 't', must be an integer"),
        (np.ones((8, 8), int), ValueError, r"shape \(8, 8\), must have one dimension"),
        (torch.ones((1, 8), dtype=torch.int64), ValueError, r"shape \(1, 8\)"),
    ],
)
def test_tokens_of_another_kind_are_refused(
    tokens: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        chunk_keys(tokens, NS)


@pytest.mark.parametrize("name", ["adapter", "salt"])
def test_an_adapter_or_salt_of_another_type_is_refused_by_name(name: str) -> None:
    wrong: dict[str, Any] = {name: 7}
    with pytest.raises(TypeError, match=f"{name} is 7, must be str, bytes or None"):
        chunk_keys([1] * CHUNK, NS, **wrong)
