"""What a token's KV looks like, and what makes two KV caches interchangeable.

`KVLayout` gives shapes and sizes; `Namespace` digests everything that changes KV bytes, so that
two engines share a chunk only if each would have computed exactly the other's.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

ITEMSIZES: dict[str, int] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""Bytes per element of each dtype KV may have, by torch's name for it."""

_LABEL = b"rootcellar namespace 1\n"
"""Changes whenever the fields below or their encoding do: old digests then match nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KVLayout:
    """The KV one rank keeps for a token, over all layers; a chunk is `chunk_tokens` of them.

    num_layers, num_kv_heads, head_dim: of this rank, so num_kv_heads is what is left after tensor
        parallelism. Multi-query attention has num_kv_heads=1.
    dtype: a name in ITEMSIZES; a torch.dtype is taken by its name.
    kv_factor: 2 for K and V, 1 where one latent holds both (MLA: num_kv_heads=1, head_dim = latent
        + rope dimensions).
    chunk_tokens: tokens in a full chunk.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    kv_factor: int = 2
    chunk_tokens: int = 256

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "chunk_tokens"):
            _check_int(name, getattr(self, name), least=1)
        if type(self.kv_factor) is not int or self.kv_factor not in (1, 2):
            raise ValueError(f"kv_factor is {self.kv_factor!r}, must be 1 (MLA) or 2 (K and V)")
        dtype = str(self.dtype).removeprefix("torch.")
        if dtype not in ITEMSIZES:
            raise ValueError(f"dtype is {self.dtype!r}, must be one of {', '.join(ITEMSIZES)}")
        object.__setattr__(self, "dtype", dtype)

    @property
    def itemsize(self) -> int:
        return ITEMSIZES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * self.kv_factor * self.num_kv_heads * self.head_dim * self.itemsize

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_tokens * self.bytes_per_token

    def shape(self, num_tokens: int) -> tuple[int, int, int, int, int]:
        """(num_layers, kv_factor, num_tokens, num_kv_heads, head_dim) of a run of tokens."""
        _check_int("num_tokens", num_tokens, least=0)
        return (self.num_layers, self.kv_factor, num_tokens, self.num_kv_heads, self.head_dim)


class FrozenMapping(Mapping[str, Any]):
    """A read-only mapping that, unlike MappingProxyType, can be pickled and deep-copied."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, name: str) -> Any:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return repr(self._items)


@dataclass(frozen=True, kw_only=True, eq=False)
class Namespace:
    """Everything that changes KV bytes; namespaces are equal exactly if their digests are.

    model, revision: the model and its exact weights (a commit or a digest of the weights; a branch
        or an empty revision would let new weights be served old KV).
    layout: of this rank's KV.
    rope: RoPE scaling and position scheme, as the model's configuration has it.
    backend: attention backend, where it changes the bits or the order of the values.
    tp_rank, tp_size: which tensor-parallel slice of the heads this is.
    sliding_window: in tokens, None for full attention.
    quantization: of the weights or the KV, by the engine's name for it.
    kv_scales: digest of the KV scales, where the cache is quantized with any.
    extra: whatever else changes KV bytes in this engine.

    rope and extra hold JSON values (dict with str keys, list or tuple, str, int, finite float,
    bool, None) and are copied. TypeError names the field and path of anything else; ValueError
    names a value out of range.
    """

    model: str
    revision: str
    layout: KVLayout
    rope: Mapping[str, Any] = field(default_factory=dict)
    backend: str = ""
    tp_rank: int = 0
    tp_size: int = 1
    sliding_window: int | None = None
    quantization: str | None = None
    kv_scales: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    digest: bytes = field(init=False, repr=False)
    """32 bytes, the same in every process and Python version."""

    def __post_init__(self) -> None:
        self._check()
        for name in ("rope", "extra"):
            object.__setattr__(self, name, _frozen(getattr(self, name), name))
        text = json.dumps(
            self.describe(), sort_keys=True, separators=(",", ":"), ensure_ascii=False
        )
        # surrogatepass: paths that are not UTF-8 are str with lone surrogates, and stay distinct.
        canonical = text.encode("utf-8", "surrogatepass")
        object.__setattr__(self, "digest", hashlib.sha256(_LABEL + canonical).digest())

    def describe(self) -> dict[str, Any]:
        """The fields the digest covers, as plain JSON types; a new copy at each call."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self) if f.init}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def _check(self) -> None:
        for name in ("model", "revision", "backend"):
            _check_str(name, getattr(self, name), empty=name == "backend")
        for name in ("quantization", "kv_scales"):
            if getattr(self, name) is not None:
                _check_str(name, getattr(self, name), empty=True)
        if not isinstance(self.layout, KVLayout):
            raise TypeError(f"layout is {self.layout!r}, must be a KVLayout")
        for name in ("rope", "extra"):
            if not isinstance(getattr(self, name), Mapping):
                raise TypeError(f"{name} is {getattr(self, name)!r}, must be a mapping")
        _check_int("tp_size", self.tp_size, least=1)
        _check_int("tp_rank", self.tp_rank, least=0)
        if self.tp_rank >= self.tp_size:
            raise ValueError(f"tp_rank is {self.tp_rank}, must be below tp_size, {self.tp_size}")
        if self.sliding_window is not None:
            _check_int("sliding_window", self.sliding_window, least=1)


def _check_int(name: str, value: object, *, least: int) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"{name} is {value!r}, must be a whole number of at least {least}")


def _check_str(name: str, value: object, *, empty: bool) -> None:
    if type(value) is not str:
        raise TypeError(f"{name} is {value!r}, must be a str")
    if not value and not empty:
        raise ValueError(f"{name} is empty, must say which weights the KV was computed with")


def _frozen(value: Any, path: str) -> Any:
    """A read-only copy of a JSON value; types are exact, so that 1, 1.0, True and "1" differ."""
    if isinstance(value, Mapping):
        for name in value:
            if type(name) is not str:
                raise TypeError(f"{path} has the key {name!r}, must be a str")
        return FrozenMapping({name: _frozen(v, f"{path}.{name}") for name, v in value.items()})
    if isinstance(value, list | tuple):
        return tuple(_frozen(item, f"{path}[{i}]") for i, item in enumerate(value))
    if type(value) is float and not math.isfinite(value):
        raise ValueError(f"{path} is {value!r}, must be finite")
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"{path} is {value!r} ({type(value).__name__}), must be a JSON value")


def _plain(value: Any) -> Any:
    """The inverse of _frozen, up to tuples becoming lists."""
    if isinstance(value, KVLayout):
        return {f.name: getattr(value, f.name) for f in fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
