"""Copies to try: planes of any strides in guarded memory, and pages and places that fit them."""

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import torch

from rootcellar.kernels import PagedKV, gather, scatter

from .emulation import Guarded

Way = Literal["gather", "scatter"]


@dataclass(frozen=True)
class Case:
    """A copy that fits. memories: all that `kv` and `chunks` lie in."""

    kv: PagedKV
    chunks: torch.Tensor
    pages: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    pages_per_chunk: int
    planes: range | None
    memories: tuple[Guarded, ...]

    def fill(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        for memory in self.memories:
            memory.array[:] = rng.integers(0, 256, len(memory.array), np.uint8)

    def contents(self) -> list[bytes]:
        """Of all memories; fails if anything outside of them was written."""
        for memory in self.memories:
            memory.check()
        return [memory.array.tobytes() for memory in self.memories]

    def run(self, way: Way, *, default_places: bool = False) -> None:
        """With the product."""
        places = None if default_places else self.places
        if way == "gather":
            gather(
                self.kv,
                self.pages,
                self.chunks,
                pages_per_chunk=self.pages_per_chunk,
                places=places,
                planes=self.planes,
            )
        else:
            scatter(
                self.chunks,
                self.kv,
                self.pages,
                pages_per_chunk=self.pages_per_chunk,
                places=places,
                planes=self.planes,
            )

    def run_naively(self, way: Way) -> None:
        """Page by page, as paged.py's picture says."""
        chosen = self.kv.planes if self.planes is None else [self.kv.planes[i] for i in self.planes]
        sizes = [plane[0].numel() for plane in chosen]
        starts = [self.pages_per_chunk * start for start in accumulate(sizes, initial=0)]
        for plane, size, start in zip(chosen, sizes, starts, strict=False):
            for page, place in zip(self.pages, self.places, strict=True):
                chunk, at = divmod(int(place), self.pages_per_chunk)
                packed = self.chunks[chunk, start + at * size :][:size].view(plane.shape[1:])
                source, target = (plane[page], packed) if way == "gather" else (packed, plane[page])
                target.copy_(source)


_head_bytes = st.sampled_from([1, 2, 3, 6, 16, 24, 32, 80, 256])
_gaps = st.sampled_from([0, 0, 0, 1, 4, 16])


@st.composite
def cases(draw: st.DrawFn, way: Way, *, most_tokens: int = 20) -> Case:
    """Pages repeat in a gather only, places in a scatter only: the others would be a race."""
    num_pages = draw(st.integers(1, 12))
    groups = draw(st.lists(_planes(num_pages, most_tokens), min_size=1, max_size=2))
    kv = PagedKV(tuple(plane for planes, _ in groups for plane in planes))
    planes = draw(st.none() | _ranges(len(kv.planes)))
    pages_per_chunk, num_chunks = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    row_bytes = kv.chunk_bytes(pages_per_chunk, planes) + draw(_gaps)
    memory = Guarded(num_chunks * row_bytes, draw(st.integers(0, 17)))
    num_places = num_chunks * pages_per_chunk
    pages, places = draw(_numbers(num_pages)), draw(_numbers(num_places))
    if way == "gather":
        places = list(dict.fromkeys(places))
    else:
        pages = list(dict.fromkeys(pages))
    count = min(len(pages), len(places))
    return Case(
        kv=kv,
        chunks=torch.from_numpy(memory.array).view(num_chunks, row_bytes),
        pages=np.array(pages[:count], np.int64),
        places=np.array(places[:count], np.int64),
        pages_per_chunk=pages_per_chunk,
        planes=planes,
        memories=(*(found for _, found in groups), memory),
    )


def packed_case(
    *,
    num_planes: int = 2,
    num_pages: int = 8,
    tokens: int = 1,
    heads: int = 1,
    head_bytes: int,
    pages_per_chunk: int,
    num_chunks: int = 1,
    misalign: int = 0,
) -> Case:
    """Planes without gaps; pages 0, 1, … go to places 0, 1, …, as many as there are of both."""
    shape = (num_planes, num_pages, tokens, heads, head_bytes)
    memory = Guarded(int(np.prod(shape)), misalign)
    kv = PagedKV(tuple(torch.from_numpy(memory.array).view(shape)))
    packed = Guarded(num_chunks * kv.chunk_bytes(pages_per_chunk))
    numbers = np.arange(min(num_pages, num_chunks * pages_per_chunk))
    chunks = torch.from_numpy(packed.array).view(num_chunks, -1)
    return Case(kv, chunks, numbers, numbers, pages_per_chunk, None, (memory, packed))


def permuted(case: Case, seed: int = 0) -> Case:
    rng = np.random.default_rng(seed)
    return replace(case, pages=rng.permutation(case.pages), places=rng.permutation(case.places))


@st.composite
def _planes(
    draw: st.DrawFn, num_pages: int, most_tokens: int
) -> tuple[tuple[torch.Tensor, ...], Guarded]:
    """Planes of one memory, whose dimensions lie in it in any order, with or without gaps."""
    tokens, heads = draw(st.integers(1, most_tokens)), draw(st.integers(1, 3))
    sizes = (draw(st.integers(1, 3)), num_pages, tokens, heads)
    strides, span = [0] * len(sizes), (head_bytes := draw(_head_bytes))
    for dim in draw(st.permutations(range(len(sizes))) | st.just([3, 2, 1, 0])):
        strides[dim] = span + draw(_gaps)
        span = strides[dim] * sizes[dim]
    memory = Guarded(span, draw(st.integers(0, 17)))
    whole = torch.from_numpy(memory.array).as_strided((*sizes, head_bytes), (*strides, 1))
    return tuple(whole), memory


def _ranges(size: int) -> st.SearchStrategy[range]:
    ends = st.tuples(st.integers(0, size - 1), st.integers(1, size))
    return ends.filter(lambda e: e[0] < e[1]).map(lambda e: range(*e))


def _numbers(size: int) -> st.SearchStrategy[list[int]]:
    """In any order, with repeats, and with runs."""
    run = st.tuples(st.integers(0, size - 1), st.integers(1, size)).map(
        lambda r: list(range(r[0], min(size, r[0] + r[1])))
    )
    return st.lists(run, max_size=6).map(lambda found: [number for r in found for number in r])
