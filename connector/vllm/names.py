"""vLLM's name of a chunk, and ours.

vLLM's offload key is the hash of the block at the chunk's end, chained over the whole prefix with
LoRA adapter, multimodal inputs and cache_salt inside, followed by the KV-cache group:

    offload key   | SHA-256, 32 bytes            | group, 4 bytes |
    key           | its last 24 bytes | group, 4 bytes | namespace, 4 bytes |

What vLLM hashes does not name the model, so that engines which share a directory would call their
chunks alike; the namespace keeps them apart. 192 bits of SHA-256 keep apart everything else.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

from vllm.v1.kv_offload.base import OffloadKey

from ...tiers.base import Key

SKIPPED_BYTES = 8
"""Of the hash, for group and namespace to have room in 32 bytes."""

TAG_BYTES = 4
MOST_REMEMBERED = 1_000_000


class Names(Protocol):
    """How the chunks of one request are called."""

    def key(self, offload_key: bytes, /) -> Key: ...

    def keys(self, block_hashes: Sequence[bytes], group_id: int, /) -> list[Key]:
        """The keys of one group's chunks that end with these blocks."""
        ...


class ChunkNames(Names):
    """Of an engine's requests; namespace: its digest."""

    def __init__(self, namespace: bytes) -> None:
        self._tag = namespace[:TAG_BYTES]

    def key(self, offload_key: bytes) -> Key:
        return offload_key[SKIPPED_BYTES:] + self._tag

    def keys(self, block_hashes: Sequence[bytes], group_id: int) -> list[Key]:
        end = group_id.to_bytes(4, "big") + self._tag
        return [block_hash[SKIPPED_BYTES:] + end for block_hash in block_hashes]


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
