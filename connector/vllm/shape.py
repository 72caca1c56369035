"""How the engine cuts KV: its cache groups, and how many of their blocks make one chunk."""

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
    get_offloading_group_ids,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Group:
    """Layers whose blocks are allocated alike."""

    group_id: int
    tokens_per_block: int
    full_attention: bool


@dataclass(frozen=True, slots=True)
class Shape:
    """The groups that are offloaded, in vLLM's order, and the sizes of the main one."""

    groups: tuple[Group, ...]
    blocks_per_chunk: int
    tokens_per_hash: int
    hbm_chunks: int
    """Chunks that the engine's own cache holds."""

    @property
    def main(self) -> Group:
        """The first group with full attention: its chunks form chains, all others hang beside.
        Without any, the first group."""
        return next((group for group in self.groups if group.full_attention), self.groups[0])

    @property
    def has_chain(self) -> bool:
        """Without full attention a hit is no prefix but a window: every chunk stands alone."""
        return self.main.full_attention

    @property
    def is_one_chain(self) -> bool:
        return self.has_chain and len(self.groups) == 1

    @property
    def chunk_tokens(self) -> int:
        return self.main.tokens_per_block * self.blocks_per_chunk

    @property
    def hashes_per_chunk(self) -> int:
        return self.chunk_tokens // self.tokens_per_hash


def offloaded_groups(kv_cache_config: KVCacheConfig) -> tuple[Group, ...]:
    specs = {i: kv_cache_config.kv_cache_groups[i].kv_cache_spec for i in _ids(kv_cache_config)}
    return tuple(
        Group(group_id, spec.block_size, isinstance(spec, FullAttentionSpec))
        for group_id, spec in specs.items()
    )


def blocks_per_chunk(groups: tuple[Group, ...], block_size: int | None) -> int:
    """Whole blocks of the coarsest group in a chunk of block_size tokens, or of about 256.

    Raises ValueError if a chunk of that size would cut a block.
    """
    tokens = max(group.tokens_per_block for group in groups)
    if block_size is None:
        return max(1, CHUNK_TOKENS // tokens)
    if block_size % tokens:
        raise ValueError(
            f"block_size is {block_size}, must be a multiple of the engine's block, {tokens} tokens"
        )
    return block_size // tokens


def _ids(kv_cache_config: KVCacheConfig) -> tuple[int, ...]:
    return tuple(get_offloading_group_ids(kv_cache_config))
