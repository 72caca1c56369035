"""How much the device check measures: enough to fill a GPU, or to see that every line runs."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeShape:
    """A decode step: a batch of one token each, through layers of linears and attention."""

    num_layers: int
    batch: int
    context_tokens: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A Llama; its prompt is as long as Scale says."""

    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    vocabulary: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How much is measured at once, and how often at most.

    num_planes, num_chunks: of the KV that kernels copy, in chunks of 256 tokens.
    far_bytes: memory whose last pages a kernel must reach; above 4 GiB, offsets take 64 bits.
    link_bytes: moved over the link per measurement; a multiple of the largest chunk.
    block_steps: decode steps in a row with write-down on, or off.
    """

    num_planes: int
    num_chunks: int
    far_bytes: int
    link_bytes: int
    decode: DecodeShape
    block_steps: int
    model: ModelShape
    prompt_chunks: int
    most_rounds: int


FULL = Scale(
    num_planes=64,
    num_chunks=32,
    far_bytes=6 << 30,
    link_bytes=512 << 20,
    decode=DecodeShape(
        num_layers=32,
        batch=64,
        context_tokens=1024,
        hidden=4096,
        intermediate=14336,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
    ),
    block_steps=60,
    model=ModelShape(
        num_layers=16,
        hidden=2048,
        intermediate=8192,
        num_heads=32,
        num_kv_heads=8,
        vocabulary=4096,
    ),
    prompt_chunks=64,
    most_rounds=40,
)
"""A device copy takes far longer than its launch; a decode step as long as an 8B model's."""

DRY = Scale(
    num_planes=4,
    num_chunks=2,
    far_bytes=4 << 20,
    link_bytes=32 << 20,
    decode=DecodeShape(
        num_layers=2,
        batch=4,
        context_tokens=64,
        hidden=128,
        intermediate=256,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
    ),
    block_steps=20,
    model=ModelShape(
        num_layers=2,
        hidden=64,
        intermediate=128,
        num_heads=4,
        num_kv_heads=2,
        vocabulary=260,
    ),
    prompt_chunks=3,
    most_rounds=2,
)

MEMCHECK = replace(DRY, num_planes=2)
"""Every access is looked at: as little as shows all kinds of them."""
