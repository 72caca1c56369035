"""Keys: a hash chained over the whole prefix, from a root bound to namespace, adapter and salt.

    root  = SHA-256(label, namespace digest, adapter, salt)     each framed, None apart from empty
    key 0 = SHA-256(root,  tokens of chunk 0)                   tokens as little-endian int32
    key i = SHA-256(key i-1, tokens of chunk i)

A chain can only continue one that has the same root, so two tenants with different salts can
meet in no key, whatever tokens they send. A tail chunk hashes fewer bytes than a full one, so its
key is nobody else's either.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..admission.base import Key
from .layout import Namespace

MAX_TOKEN = 2**31 - 1

_LABEL = b"rootcellar keys 1\n"
_INT32 = np.dtype("<i4")


class HasArray(Protocol):
    """A numpy array, or a torch tensor in CPU memory."""

    def __array__(self) -> npt.NDArray[Any]: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...


Tokens = Sequence[int] | memoryview | HasArray
"""Token ids, one dimension. C-contiguous int32 arrays and memoryviews are hashed where they lie."""


def chunk_keys(
    tokens: Tokens,
    ns: Namespace,
    *,
    adapter: str | bytes | None = None,
    salt: str | bytes | None = None,
    tail: bool = False,
) -> list[Key]:
    """One 32-byte key per full chunk of `tokens`; tail=True adds that of a last, shorter one.

    adapter, salt: name the LoRA adapter and the tenant. Whatever differs, differs: None is not
    empty, and a str is not the bytes of the same text.
    ValueError or TypeError names the position of an id that is negative, above int32 or no integer
    (a bool in a list is the integer it is).
    """
    return extend_keys((), tokens, ns, adapter=adapter, salt=salt, tail=tail)


def extend_keys(
    keys: Sequence[Key],
    tokens: Tokens,
    ns: Namespace,
    *,
    adapter: str | bytes | None = None,
    salt: str | bytes | None = None,
    tail: bool = False,
) -> list[Key]:
    """What chunk_keys(tokens, …) returns, hashing only the chunks after `keys`.

    keys: an earlier result for a prefix of the same tokens and the same other arguments, without
    its tail key; taken on trust, as are the tokens it covers.
    """
    step = ns.layout.chunk_tokens
    start, count = len(keys) * step, len(tokens)
    if start > count:
        raise ValueError(f"keys cover {start} tokens, must be at most the {count} given")
    stop = count if tail else count - count % step
    raw = int32_bytes(tokens, start, stop, step)
    return [*keys, *_links(keys[-1] if keys else _root(ns, adapter, salt), raw, 4 * step)]


def _root(ns: Namespace, adapter: str | bytes | None, salt: str | bytes | None) -> bytes:
    return sha256(_LABEL + ns.digest + _framed("adapter", adapter) + _framed("salt", salt)).digest()


def _framed(name: str, value: str | bytes | None) -> bytes:
    """Kind, length, content: no two values, nor any two pairs of them, frame to the same bytes."""
    if value is None:
        return b"\0"
    if isinstance(value, str):
        kind, content = b"\1", value.encode("utf-8", "surrogatepass")
    elif isinstance(value, bytes):
        kind, content = b"\2", value
    else:
        raise TypeError(f"{name} is {value!r}, must be str, bytes or None")
    return kind + len(content).to_bytes(8, "little") + content


def _links(key: bytes, raw: memoryview, step: int) -> Iterator[bytes]:
    for start in range(0, len(raw), step):
        link = sha256(key)
        link.update(raw[start : start + step])
        key = link.digest()
        yield key


def int32_bytes(tokens: Tokens, start: int, stop: int, step: int) -> memoryview:
    """tokens[start:stop] as little-endian int32, in place where they are that already."""
    if not isinstance(tokens, memoryview) and not hasattr(tokens, "__array__"):
        ids = tokens if isinstance(tokens, list | tuple) else list(tokens)
        return _pack(ids, start, stop, step)
    array = np.asarray(tokens)
    if array.dtype.kind not in "iu":
        raise TypeError(f"tokens have dtype {array.dtype}, must be integers")
    if array.ndim != 1:
        raise ValueError(f"tokens have shape {array.shape}, must have one dimension")
    array = array[start:stop]
    _check_range(array, start)
    return np.ascontiguousarray(array, _INT32).view(np.uint8).data


def _pack(tokens: Sequence[int], start: int, stop: int, step: int) -> memoryview:
    raw = bytearray(4 * (stop - start))
    pack_into = _packer(step).pack_into
    last = stop - (stop - start) % step
    try:
        for i in range(start, last, step):
            pack_into(raw, 4 * (i - start), *tokens[i : i + step])
        struct.pack_into(f"<{stop - last}i", raw, 4 * (last - start), *tokens[last:stop])
    except struct.error:
        _raise_for_bad_id(tokens, start, stop)
        raise
    _check_range(np.frombuffer(raw, _INT32), start)
    return memoryview(raw)


@lru_cache(maxsize=16)
def _packer(step: int) -> struct.Struct:
    return struct.Struct(f"<{step}i")


def _check_range(array: npt.NDArray[Any], start: int) -> None:
    if array.size and (array.min() < 0 or array.max() > MAX_TOKEN):
        at = int(np.argmax((array < 0) | (array > MAX_TOKEN)))
        raise ValueError(_out_of_range(start + at, int(array[at])))


def _raise_for_bad_id(tokens: Sequence[int], start: int, stop: int) -> None:
    for at in range(start, stop):
        if not hasattr(tokens[at], "__index__"):
            raise TypeError(f"token {at} is {tokens[at]!r}, must be an integer")
        if not 0 <= tokens[at] <= MAX_TOKEN:
            raise ValueError(_out_of_range(at, tokens[at]))


def _out_of_range(at: int, value: int) -> str:
    return f"token {at} is {value}, must be from 0 to {MAX_TOKEN}"
