"""Quantised copies to try: elements of any strides and any bits, all in guarded memory."""

from dataclasses import dataclass
from typing import Literal

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import torch

from rootcellar.kernels.fp8 import fp8_chunk_bytes, gather_fp8, scatter_fp8
from rootcellar.kernels.fp8_copy import layout_of
from rootcellar.kernels.paged import PagedKV

from .emulation import Guarded

Way = Literal["gather", "scatter"]
Content = Literal["any bits", "ordinary", "zeros", "subnormal", "special", "ties"]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
CONTENTS: list[Content] = ["any bits", "ordinary", "zeros", "subnormal", "special", "ties"]
TIES = [*[448.0] * 100, *range(-447, 448), *(k / 1024 for k in range(-33, 33))]
"""By a scale of 1, many are half-way between two numbers of e4m3, normal and subnormal."""

SPECIAL = [0.0, -0.0, 1.0, -448.0, 1e-30, float("inf"), -float("inf"), float("nan"), -float("nan")]


@dataclass(frozen=True)
class Fp8Case:
    """A copy that fits, either way. memories: all that the planes lie in."""

    kv: PagedKV
    dtype: torch.dtype
    chunks: torch.Tensor
    pages: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    pages_per_chunk: int
    memories: tuple[Guarded, ...]
    chunk_memory: Guarded

    def fill(self, content: Content = "any bits", seed: int = 0) -> None:
        """Pages as said; chunks with codes of any bits, and scales of any size."""
        rng = np.random.default_rng(seed)
        for memory in self.memories:
            memory.array[:] = drawn(content, self.dtype, len(memory.array), rng)
        chunk = self.chunk_memory.array
        chunk[:] = rng.integers(0, 256, len(chunk), np.uint8)
        start = layout_of(self.kv, self.pages_per_chunk).scales[0]
        scales = self.chunks.numpy()[:, start:].view(np.float32)
        scales[...] = drawn_scales(self.dtype, scales.size, rng).reshape(scales.shape)

    def contents(self) -> list[bytes]:
        """Of all memories; fails if anything outside of them was written."""
        memories = (*self.memories, self.chunk_memory)
        for memory in memories:
            memory.check()
        return [memory.array.tobytes() for memory in memories]

    def run(self, way: Way) -> None:
        """With the product."""
        each, places = self.pages_per_chunk, self.places
        if way == "gather":
            gather_fp8(self.kv, self.pages, self.chunks, pages_per_chunk=each, places=places)
        else:
            scatter_fp8(self.chunks, self.kv, self.pages, pages_per_chunk=each, places=places)


def drawn(
    content: Content, dtype: torch.dtype, num_bytes: int, rng: np.random.Generator
) -> npt.NDArray[np.uint8]:
    """Bytes of elements of that kind."""
    count = -(-num_bytes // dtype.itemsize)
    if content == "any bits":
        return rng.integers(0, 256, num_bytes, np.uint8)
    if content == "subnormal":
        smallest = torch.finfo(dtype).smallest_normal
        values = rng.uniform(-smallest, smallest, count)
    elif content == "special":
        values = rng.choice(SPECIAL, count)
    elif content == "ties":
        values = rng.choice(TIES, count)
    else:
        values = rng.standard_normal(count) * (content == "ordinary")
    elements = torch.from_numpy(values).to(dtype)
    return elements.view(torch.uint8).numpy()[:num_bytes]


def drawn_scales(
    dtype: torch.dtype, count: int, rng: np.random.Generator
) -> npt.NDArray[np.float32]:
    """A third of any bits; a third of few, so that products are half-way between two numbers; and a
    third with products around the largest number."""
    any_bits = rng.integers(0, 1 << 32, count, np.uint32).view(np.float32)
    short = np.ldexp(rng.integers(64, 128, count) / 64, rng.integers(-149, 127, count))
    limit = torch.finfo(dtype)
    large = limit.max / 448 * (1 + rng.uniform(-1, 1, count) * limit.eps)
    kinds = np.arange(count) % 3
    return np.select([kinds == 0, kinds == 1], [any_bits, short.astype("f4")], large.astype("f4"))


@st.composite
def fp8_cases(draw: st.DrawFn, way: Way) -> Fp8Case:
    """Whole chunks in a gather. Pages repeat in a gather only, places in a scatter only: the others
    would be a race."""
    dtype = draw(st.sampled_from(DTYPES))
    num_pages = draw(st.integers(1, 8))
    groups = draw(st.lists(_planes(num_pages, dtype.itemsize), min_size=1, max_size=2))
    kv = PagedKV(tuple(plane for planes, _ in groups for plane in planes), dtype=dtype)
    pages_per_chunk, num_chunks = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    chunks, chunk_memory = _chunks(
        kv, pages_per_chunk, num_chunks, gap=draw(st.sampled_from([0, 16]))
    )
    num_places = num_chunks * pages_per_chunk
    if way == "gather":
        taken = draw(st.lists(st.integers(0, num_chunks - 1), unique=True))
        places = [row * pages_per_chunk + p for row in taken for p in range(pages_per_chunk)]
        places = draw(st.permutations(places))
        pages = [draw(st.integers(0, num_pages - 1)) for _ in places]
    else:
        pages = draw(st.lists(st.integers(0, num_pages - 1), unique=True))
        places = [draw(st.integers(0, num_places - 1)) for _ in pages]
    return Fp8Case(
        kv=kv,
        dtype=dtype,
        chunks=chunks,
        pages=np.array(pages, np.int64),
        places=np.array(places, np.int64),
        pages_per_chunk=pages_per_chunk,
        memories=tuple(found for _, found in groups),
        chunk_memory=chunk_memory,
    )


def packed_fp8_case(
    *,
    dtype: torch.dtype,
    num_planes: int = 2,
    tokens: int = 1,
    heads: int = 2,
    head_dim: int,
    pages_per_chunk: int,
    num_chunks: int = 1,
    misalign: int = 0,
) -> Fp8Case:
    """Planes without gaps; all pages, the last first, go to all places."""
    num_places = pages_per_chunk * num_chunks
    shape = (num_planes, num_places, tokens, heads, head_dim * dtype.itemsize)
    memory = Guarded(int(np.prod(shape)), misalign)
    kv = PagedKV(tuple(torch.from_numpy(memory.array).view(shape)), dtype=dtype)
    chunks, chunk_memory = _chunks(kv, pages_per_chunk, num_chunks)
    numbers = np.arange(num_places)
    return Fp8Case(
        kv, dtype, chunks, numbers[::-1].copy(), numbers, pages_per_chunk, (memory,), chunk_memory
    )


def _chunks(
    kv: PagedKV, pages_per_chunk: int, num_chunks: int, gap: int = 0
) -> tuple[torch.Tensor, Guarded]:
    """No byte longer than they must be, with `gap` bytes or more between them."""
    size_bytes = fp8_chunk_bytes(kv, pages_per_chunk)
    stride = -(-size_bytes // 16) * 16 + gap
    memory = Guarded((num_chunks - 1) * stride + size_bytes, misalign=16)
    rows = torch.from_numpy(memory.array).as_strided((num_chunks, size_bytes), (stride, 1))
    return rows, memory


@st.composite
def _planes(
    draw: st.DrawFn, num_pages: int, itemsize: int
) -> tuple[tuple[torch.Tensor, ...], Guarded]:
    """Planes of one memory, whose dimensions lie in it in any order, with or without gaps."""
    head_bytes = itemsize * draw(st.sampled_from([1, 2, 3, 7, 8, 9, 16, 24, 61, 128]))
    gaps = st.sampled_from([0, 0, 0, itemsize, 16])
    sizes = (draw(st.integers(1, 2)), num_pages, draw(st.integers(1, 6)), draw(st.integers(1, 3)))
    strides, span = [0] * len(sizes), head_bytes
    for dim in draw(st.permutations(range(len(sizes))) | st.just([3, 2, 1, 0])):
        strides[dim] = span + draw(gaps)
        span = strides[dim] * sizes[dim]
    memory = Guarded(span, itemsize * draw(st.integers(0, 9)))
    whole = torch.from_numpy(memory.array).as_strided((*sizes, head_bytes), (*strides, 1))
    return tuple(whole), memory
