"""Vocabulary of the tiers: what a lookup, a load and a store job are.

A chain is the keys of one request, head first; all ranges are half-open chunk indices into it.
A chunk may hang beside a chunk of a chain, its anchor: KV of other layers for the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal

from ..admission.base import Chain, Key, Tier

if TYPE_CHECKING:
    from .dram import DramChunk
    from .io.base import ChunkMeta

__all__ = [
    "BesideJob",
    "ChainJob",
    "ChunkFile",
    "DirectLoad",
    "Key",
    "Load",
    "LoadState",
    "Lookup",
    "StoreJob",
    "Tier",
    "WriteDown",
]

WriteDown = Literal["late", "eager"]
"""When chunks in DRAM are written to NVMe: before they would be evicted, or once complete."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """The longest run of a chain, from its head or where it was asked for, that can be loaded now.

    tiers has one entry per chunk of the run: the fastest tier that can serve it. why_not says why
    the run ended where it did; it is empty when the whole chain is there.
    """

    num_chunks: int
    num_tokens: int
    tiers: tuple[Tier, ...]
    why_not: str = ""


class LoadState(Enum):
    PENDING = "pending"
    READY = "ready"
    DONE = "done"
    """complete_load was called: the views are no longer valid."""


@dataclass(slots=True, eq=False)
class Load:
    """Chunks keys[start:stop], pinned in DRAM until complete_load; owned by the caller.

    stop only shrinks: a chunk that cannot be read, or is late, cuts the run there. Once READY,
    every chunk of keys[start:stop] is in DRAM and verified.
    """

    keys: Chain
    start: int
    stop: int
    tiers: tuple[Tier, ...]
    """Where each chunk of the run was found when the load was prepared."""
    deadline_s: float
    state: LoadState = LoadState.PENDING
    why_not: str = ""
    chunks: list[DramChunk] = field(default_factory=list["DramChunk"])
    """The pinned chunks, one per key from start on; longer than stop - start after a cut."""
    missing: set[int] = field(default_factory=set[int])
    """Indices below stop whose read is still under way."""


@dataclass(frozen=True, slots=True)
class ChunkFile:
    """A chunk as it lies on disk: its header, then what was stored, padded."""

    path: str
    meta: ChunkMeta


@dataclass(slots=True, eq=False)
class DirectLoad:
    """Chunks keys[start:stop], lent as files to whoever reads and verifies them; owned by the
    caller.

    files: one per chunk from start on. Until complete_direct none is removed or written over to
    make room. stop only shrinks, to start: then nothing of it may be served any more.
    """

    keys: Chain
    start: int
    stop: int
    files: tuple[ChunkFile, ...]
    done: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class StoreJob:
    """Slots reserved for the chunks a caller was asked to write; owned by the caller.

    wanted: indices into keys that need bytes, ascending (chunks that are there already are not).
    why_not: why some that are not there are not wanted either.
    """

    keys: Chain
    wanted: tuple[int, ...] = ()
    chunks: tuple[DramChunk, ...] = ()
    """The reserved chunks, one per index in wanted."""
    why_not: str = ""
    done: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class ChainJob(StoreJob):
    """keys is a chain; keys[:stop] will be in the cold tiers once the job succeeds."""

    start: int
    stop: int


@dataclass(slots=True, eq=False, kw_only=True)
class BesideJob(StoreJob):
    """keys[i] hangs from anchors[i], a chunk of a chain."""

    anchors: tuple[Key, ...]
