"""vLLM's name of a chunk, and ours.

vLLM's offload key is the hash of the block at the chunk's end, chained over the whole prefix with
LoRA adapter, multimodal inputs and cache_salt inside, followed by four bytes of KV-cache group.
Ours is 32 bytes: with one group, the hash; with several, the offload key's last 32 bytes, which
leaves 224 bits of SHA-256.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

from vllm.v1.kv_offload.base import OffloadKey

from ...tiers.base import Key

GROUP_BYTES = 4
KEY_BYTES = 32
MOST_REMEMBERED = 1_000_000


class Names(Protocol):
    """How the chunks of one request are called."""

    def key(self, offload_key: bytes, /) -> Key: ...

    def keys(self, block_hashes: Sequence[bytes], group_id: int, /) -> list[Key]:
        """The keys of one group's chunks that end with these blocks."""
        ...


class ChunkNames(Names):
    """group_ids: of the engine's groups that are offloaded."""

    def __init__(self, group_ids: Sequence[int]) -> None:
        self._only = _suffix(group_ids[0]) if len(group_ids) == 1 else None

    def key(self, offload_key: bytes) -> Key:
        return offload_key[-KEY_BYTES:] if self._only is None else offload_key[:-GROUP_BYTES]

    def keys(self, block_hashes: Sequence[bytes], group_id: int) -> list[Key]:
        if self._only is not None:
            return list(block_hashes)
        suffix = _suffix(group_id)
        return [block_hash[GROUP_BYTES:] + suffix for block_hash in block_hashes]


class SaltedNames(Names):
    """Of requests whose KV depends on more than vLLM's hashes say."""

    def __init__(self, names: Names, salt: bytes) -> None:
        self._names = names
        self._salt = salt

    def key(self, offload_key: bytes) -> Key:
        return self._salted(self._names.key(offload_key))

    def keys(self, block_hashes: Sequence[bytes], group_id: int) -> list[Key]:
        return [self._salted(key) for key in self._names.keys(block_hashes, group_id)]

    def _salted(self, key: Key) -> Key:
        return hashlib.sha256(self._salt + key).digest()


class NameBook:
    """vLLM's names by ours, for events; those written down longest ago are forgotten first."""

    def __init__(self) -> None:
        self._names: OrderedDict[Key, OffloadKey] = OrderedDict()

    def write(self, keys: Iterable[Key], offload_keys: Iterable[OffloadKey]) -> None:
        self._names.update(zip(keys, offload_keys, strict=True))
        while len(self._names) > MOST_REMEMBERED:
            self._names.popitem(last=False)

    def offload_key(self, key: Key) -> OffloadKey | None:
        """None for a chunk of an earlier start, or of too long ago."""
        return self._names.get(key)


def _suffix(group_id: int) -> bytes:
    return group_id.to_bytes(GROUP_BYTES, "big")
