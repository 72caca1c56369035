"""KV as engines keep it, and what gather and scatter must make of it, said in torch's indexing.

blocks   vLLM's: 16 tokens of 8 heads a page, K and V apart
slots    our page pool: a token a page
latents  multi-head latent attention: one head of 576, no V, a token a page
heads    transformers': (heads, tokens, dim), a token a page, whose heads lie far apart
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from ..kernels import PagedKV
from ..kernels.paged import page_bytes

NAMES = ("blocks", "slots", "latents", "heads")
CHUNK_TOKENS = 256
BLOCK_TOKENS = 16
HEADS, HEAD_DIM = 8, 128
LATENT_DIM = 576

Pages = npt.NDArray[np.int64]

_HEAD_BYTES = HEAD_DIM * 2  # all of them bfloat16
_FILL = 0xA5
_MARGIN_BYTES = 24  # so that rows are no better aligned than they must be


@dataclass(frozen=True, eq=False)
class EnginePages:
    """Flat memory and the planes in it. view: of this memory or another of its size."""

    name: str
    memory: torch.Tensor
    view: Callable[[torch.Tensor], PagedKV]
    pages_per_chunk: int

    @cached_property
    def kv(self) -> PagedKV:
        return self.view(self.memory)


def engine_pages(
    name: str, num_planes: int, num_chunks: int, generator: torch.Generator
) -> EnginePages:
    """Room for num_chunks, filled with noise. name: as above. num_planes: even."""
    num_tokens, layers = num_chunks * CHUNK_TOKENS, num_planes // 2
    token_bytes, view, pages_per_chunk = {
        "blocks": (HEADS * _HEAD_BYTES, _blocks(layers), CHUNK_TOKENS // BLOCK_TOKENS),
        "slots": (HEADS * _HEAD_BYTES, _slots(layers), CHUNK_TOKENS),
        "latents": (LATENT_DIM * 2, _latents(num_planes), CHUNK_TOKENS),
        "heads": (HEADS * _HEAD_BYTES, _heads(layers), CHUNK_TOKENS),
    }[name]
    memory = noise(num_planes * num_tokens * token_bytes, generator)
    return EnginePages(name, memory, view, pages_per_chunk)


def noise(size_bytes: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(
        256, (size_bytes,), dtype=torch.uint8, device=generator.device, generator=generator
    )


def scattered(num_pages: int, kv: PagedKV, seed: int) -> Pages:
    """Pages in no order, each once."""
    return np.random.default_rng(seed).permutation(kv.num_pages)[:num_pages].astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Moved:
    """A copy to check: page pages[i] of the chosen planes and place places[i] of the chunks."""

    engine: EnginePages
    pages: Pages
    places: Pages
    planes: range

    def empty_rows(self) -> torch.Tensor:
        """Memory for all chunks and around each, filled with a pattern."""
        num_chunks = int(self.places.max()) // self.engine.pages_per_chunk + 1
        shape = (num_chunks, self._chunk_bytes + 2 * _MARGIN_BYTES)
        return torch.full(shape, _FILL, dtype=torch.uint8, device=self.engine.memory.device)

    def chunks(self, rows: torch.Tensor) -> torch.Tensor:
        """Of such rows, what is not around them."""
        return rows[:, _MARGIN_BYTES : _MARGIN_BYTES + self._chunk_bytes]

    def gathered(self) -> torch.Tensor:
        """The rows, once the chunks in them are gathered."""
        rows = self.empty_rows()
        pages, chunks, places = self._indices()
        for plane, part in self._parts(self.engine.kv, rows):
            part[chunks, places] = plane[pages].reshape(len(pages), -1)
        return rows

    def scattered(self, rows: torch.Tensor) -> torch.Tensor:
        """The engine's memory, once the chunks in such rows are scattered into it."""
        memory = self.engine.memory.clone()
        pages, chunks, places = self._indices()
        for plane, part in self._parts(self.engine.view(memory), rows):
            plane[pages] = part[chunks, places].view(len(pages), *plane.shape[1:])
        return memory

    @property
    def _chunk_bytes(self) -> int:
        return self.engine.kv.chunk_bytes(self.engine.pages_per_chunk, self.planes)

    def _indices(self) -> list[torch.Tensor]:
        """Of every page: itself, its chunk, and its place in there."""
        numbers = (self.pages, *np.divmod(self.places, self.engine.pages_per_chunk))
        return [torch.from_numpy(each).to(self.engine.memory.device) for each in numbers]

    def _parts(
        self, kv: PagedKV, rows: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each plane and, of every chunk, its part as (num_chunks, places, page_bytes)."""
        start, per_chunk = _MARGIN_BYTES, self.engine.pages_per_chunk
        for plane in kv.planes[self.planes.start : self.planes.stop]:
            size = page_bytes(plane)
            yield plane, rows[:, start : start + per_chunk * size].view(-1, per_chunk, size)
            start += per_chunk * size


def _blocks(layers: int) -> Callable[[torch.Tensor], PagedKV]:
    def view(memory: torch.Tensor) -> PagedKV:
        shape = (layers, 2, -1, BLOCK_TOKENS, HEADS, _HEAD_BYTES)
        return PagedKV(tuple(memory.view(shape).flatten(0, 1)), layers, torch.bfloat16)

    return view


def _slots(layers: int) -> Callable[[torch.Tensor], PagedKV]:
    return lambda memory: PagedKV.of_slots(
        memory.view(torch.bfloat16).view(layers, 2, -1, HEADS, HEAD_DIM)
    )


def _latents(layers: int) -> Callable[[torch.Tensor], PagedKV]:
    return lambda memory: PagedKV.of_slots(
        memory.view(torch.bfloat16).view(layers, 1, -1, 1, LATENT_DIM)
    )


def _heads(layers: int) -> Callable[[torch.Tensor], PagedKV]:
    def view(memory: torch.Tensor) -> PagedKV:
        states = memory.view(torch.bfloat16).view(layers, 2, 1, HEADS, -1, HEAD_DIM)
        return PagedKV.of_heads([tuple(layer) for layer in states])

    return view
