"""Stores for measuring hits: chunks known to lie in DRAM, chunks known to lie on NVMe only."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..admission.always import Always
from ..admission.base import Answer, Boundary, Decision, Key, Offer, Tier
from ..tiers.chunk_file import SUFFIX, file_bytes
from ..tiers.config import IoKind, StoreConfig
from ..tiers.io.base import Codec
from ..tiers.keys import chunk_keys
from ..tiers.layout import KVLayout, Namespace
from ..tiers.store import TieredStore

CHUNK_UNIT_BYTES = 128 << 10
"""One layer, one head of 128 in bfloat16, K and V, 256 tokens."""
WRITE_SLOTS = 8
WRITE_TIMEOUT_S = 600.0
LOAD_TIMEOUT_S = 120.0
"""A slow read is to be measured, not cut short."""


class ServesInPlace(Always):
    """Nothing crosses between the tiers: each hit comes from where its chunk was put."""

    def decide(self, offer: Offer) -> Decision:
        if offer.boundary is Boundary.INTO_DRAM:
            return super().decide(offer)
        return Decision(Answer.REJECT, offer.start, "served in place")


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chains of one namespace and what is in their chunks: noise, numbered at the front."""

    namespace: Namespace
    noise: torch.Tensor

    @classmethod
    def of_size(cls, chunk_bytes: int, seed: int) -> Chunks:
        """ValueError unless chunk_bytes is a multiple of CHUNK_UNIT_BYTES."""
        layout = layout_of(chunk_bytes)
        content = bytearray(np.random.default_rng(seed).bytes(chunk_bytes))
        noise = torch.frombuffer(content, dtype=torch.bfloat16).view(layout.shape(256))
        return cls(Namespace(model="bench/noise", revision="1", layout=layout), noise)

    @property
    def layout(self) -> KVLayout:
        return self.namespace.layout

    def chain(self, name: str, num_chunks: int) -> list[Key]:
        """Keys that only a chain of the same name shares."""
        tokens = np.zeros(num_chunks * self.layout.chunk_tokens, np.int32)
        return chunk_keys(tokens, self.namespace, salt=name)

    def numbered(self, index: int) -> torch.Tensor:
        """The content of a chain's chunk `index`; valid until the next call."""
        self.noise.view(torch.int64).view(-1)[0] = index
        return self.noise

    def is_numbered(self, tensor: torch.Tensor, index: int) -> bool:
        return torch.equal(tensor.view(torch.int64), self.numbered(index).view(torch.int64))

    def put(self, store: TieredStore, keys: Sequence[Key]) -> None:
        """OSError when the store does not take all of them."""
        for index in range(len(keys)):
            if store.put(keys[: index + 1], [self.numbered(index)], index) != 1:
                raise OSError(f"the store took {index} of {len(keys)} chunks: {_why(store)}")


def layout_of(chunk_bytes: int) -> KVLayout:
    """A usual layout with chunks of that size: 32 layers of 8 heads at 32 MiB, 4 of 2 at 1 MiB."""
    units, rest = divmod(chunk_bytes, CHUNK_UNIT_BYTES)
    if units < 1 or rest:
        raise ValueError(f"chunk_bytes is {chunk_bytes}, must be a multiple of {CHUNK_UNIT_BYTES}")
    heads = next(n for n in (8, 2, 1) if units % n == 0 and (n == 1 or units >= n * 4))
    return KVLayout(num_layers=units // heads, num_kv_heads=heads, head_dim=128, dtype="bfloat16")


def fill(root: Path, chunks: Chunks, keys: Sequence[Key]) -> None:
    """A store at `root` with exactly this chain, in files. OSError when the disk refuses."""
    config = StoreConfig(
        dram_bytes=WRITE_SLOTS * chunks.layout.chunk_bytes,
        nvme_path=root,
        nvme_bytes=len(keys) * file_bytes(chunks.layout.chunk_bytes, Codec.RAW),
        io="threads",
        load_timeout_s=WRITE_TIMEOUT_S,
    )
    with TieredStore(config, chunks.namespace) as store:
        chunks.put(store, keys)
        if not store.flush(WRITE_TIMEOUT_S):
            raise OSError(f"{root} takes longer than {WRITE_TIMEOUT_S:.0f} s to write")


def twin(root: Path, copy: Path) -> None:
    """A second store directory with the very same chunk files, where links can be made."""
    shutil.copytree(root, copy, copy_function=_link_chunk)


def open_in_place(root: Path, chunks: Chunks, num_slots: int, io: IoKind) -> TieredStore:
    """Opens what fill() wrote; its chunks stay on NVMe, and what is put now in DRAM."""
    config = StoreConfig(
        dram_bytes=num_slots * chunks.layout.chunk_bytes,
        nvme_path=root,
        nvme_bytes=1 << 50,  # holds what is there; nothing is written
        io=io,
        admission=ServesInPlace,
        load_timeout_s=LOAD_TIMEOUT_S,
    )
    store = TieredStore(config, chunks.namespace)
    _wait_touched(store)
    return store


def require_tier(store: TieredStore, keys: Sequence[Key], tier: Tier) -> None:
    """OSError unless the whole chain would be served by `tier`."""
    found = store.lookup(keys)
    if found.tiers != (tier,) * len(keys):
        wanted = f"{len(keys)} chunks in {tier}"
        raise OSError(f"found {found.num_chunks} chunks, not {wanted}: {_why(store)}")


def files_of(root: Path, keys: Sequence[Key]) -> list[Path]:
    """The chunk files of a chain, in its order."""
    paths = {path.stem: path for path in root.rglob(f"*{SUFFIX}")}
    return [paths[key.hex()] for key in keys]


def _wait_touched(store: TieredStore) -> None:
    """Until every slot has its memory: what is put before that may find DRAM full."""
    deadline_s = time.monotonic() + WRITE_TIMEOUT_S
    while (dram := store.stats()["dram"])["slots_touched"] < dram["slots"]:
        if time.monotonic() > deadline_s:
            store.close()
            raise OSError(f"{dram['slots_touched']} of {dram['slots']} slots have their memory")
        time.sleep(0.01)


def _link_chunk(source: str, target: str) -> None:
    if source.endswith(SUFFIX):
        try:
            os.link(source, target)
            return
        except OSError:
            pass  # a file system without links: the copy has the same bytes
    shutil.copy2(source, target)


def _why(store: TieredStore) -> str:
    reasons = store.stats()["why_not"]
    return ", ".join(reasons) or "no reason known"
