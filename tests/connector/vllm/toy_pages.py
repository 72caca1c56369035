"""KV caches of odd shapes, and a model that says byte by byte where each of them must go."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    OffloadingWorker,
)

from rootcellar.connector.vllm.pages import PageLayout
from rootcellar.connector.vllm.slots import SlotSpec
from rootcellar.connector.vllm.worker import SlotWorker
from rootcellar.tiers.arena import SharedArena
from rootcellar.tiers.cuda_runtime import CudaRuntime
from rootcellar.tiers.device import CpuDevice, Device
from rootcellar.tiers.movers import aligned
from rootcellar.tiers.transfer import Transfer as Copies

Bytes = npt.NDArray[np.uint8]
MakeWorker = Callable[[PageLayout], OffloadingWorker]

NUM_SLOTS = 9
NUM_BLOCKS = 30
LEAD = 16
"""Bytes in front of a tensor's first row; nobody may touch them, nor what lies between rows."""


@dataclass(frozen=True)
class Shape:
    """tensors: (page_bytes, row_bytes) each; groups: (tensor, page_bytes) per ref."""

    tensors: list[tuple[int, int]]
    groups: list[list[tuple[int, int]]]
    blocks_per_chunk: int
    slack_bytes: int = 0

    @property
    def rank_bytes(self) -> int:
        pages = max(sum(page_bytes for _, page_bytes in refs) for refs in self.groups)
        return pages * self.blocks_per_chunk + self.slack_bytes


@dataclass
class Cache:
    """One rank's KV cache in memory of our own, so that all of it can be compared."""

    shape: Shape
    seed: int
    memory: list[Bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.memory = [
            np.zeros(LEAD + NUM_BLOCKS * row_bytes, np.uint8) for _, row_bytes in self.shape.tensors
        ]
        self.fill(self.seed)

    def fill(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        for memory in self.memory:
            memory[:] = draw.integers(0, 256, len(memory))

    def page_at(self, tensor: int, block: int) -> int:
        return LEAD + block * self.shape.tensors[tensor][1]

    def canonical(self) -> CanonicalKVCaches:
        tensors = [
            CanonicalKVCacheTensor(
                torch.from_numpy(memory)
                .view(torch.int8)
                .as_strided((NUM_BLOCKS, page_bytes), (row_bytes, 1), LEAD),
                page_bytes,
            )
            for memory, (page_bytes, row_bytes) in zip(self.memory, self.shape.tensors, strict=True)
        ]
        refs = [[CanonicalKVCacheRef(*ref) for ref in refs] for refs in self.shape.groups]
        return CanonicalKVCaches(tensors, refs)

    def layout(self, rank: int = 0, *, replicated: bool = False) -> PageLayout:
        return PageLayout(
            self.canonical(),
            blocks_per_chunk=self.shape.blocks_per_chunk,
            rank=rank,
            rank_bytes=self.shape.rank_bytes,
            replicated=replicated,
        )


@dataclass(frozen=True)
class Transfer:
    """groups: per KV-cache group (block index, blocks)."""

    groups: list[tuple[int, list[int]]]
    slots: list[int]

    @property
    def pages(self) -> GPULoadStoreSpec:
        return GPULoadStoreSpec(
            [block for _, blocks in self.groups for block in blocks],
            group_sizes=[len(blocks) for _, blocks in self.groups],
            block_indices=[index for index, _ in self.groups],
        )

    def into(self, arena: SharedArena) -> SlotSpec:
        return SlotSpec(arena.shared_at, tuple(self.slots))

    def places(
        self, cache: Cache, slot_bytes: int, slice_start: int
    ) -> Iterator[tuple[int, int, int, int]]:
        """(tensor, first byte in its memory, first byte in the arena, bytes) of every page."""
        shape, slots = cache.shape, iter(self.slots)
        for (index, blocks), refs in zip(self.groups, shape.groups, strict=True):
            slot = -1
            for nth, block in enumerate(blocks, index):
                place = nth % shape.blocks_per_chunk
                if place == 0 or nth == index:
                    slot = next(slots)
                at = slot * slot_bytes + slice_start
                for tensor, page_bytes in refs:
                    yield (
                        tensor,
                        cache.page_at(tensor, block),
                        at + place * page_bytes,
                        page_bytes,
                    )
                    at += shape.blocks_per_chunk * page_bytes
        assert next(slots, None) is None

    def num_bytes(self, cache: Cache) -> int:
        return sum(size for _, _, _, size in self.places(cache, 0, 0))


@dataclass(frozen=True)
class Case:
    """A store of whole chunks, and a load of a part of them into pages of other blocks."""

    shape: Shape
    ranks: int
    replicated: bool
    stored: Transfer
    loaded: Transfer
    seed: int


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    wide = st.integers(1, 5).map(lambda words: 8 * words)
    page = st.one_of(st.integers(1, 21), wide)
    gap = st.one_of(st.just(0), st.integers(0, 9), wide)
    tensors = [(size, size + draw(gap)) for size in draw(st.lists(page, min_size=1, max_size=3))]
    groups: list[list[tuple[int, int]]] = []
    for _ in range(draw(st.integers(1, 3))):
        chosen = draw(st.lists(st.integers(0, len(tensors) - 1), min_size=1, unique=True))
        groups.append([(i, draw(st.sampled_from([tensors[i][0], 1, 8]))) for i in chosen])
        groups[-1] = [(i, min(size, tensors[i][0])) for i, size in groups[-1]]
    return Shape(tensors, groups, draw(st.integers(1, 4)), draw(st.integers(0, 3)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = draw(shapes())
    n = shape.blocks_per_chunk
    most = max(1, min(NUM_SLOTS, NUM_BLOCKS // n) // len(shape.groups))
    chunks = [draw(st.integers(0, most)) for _ in shape.groups]
    starts = [n * draw(st.integers(0, 5)) for _ in shape.groups]
    slots = draw(st.permutations(range(NUM_SLOTS)))[: sum(chunks)]
    stored = [(start, n * count) for start, count in zip(starts, chunks, strict=True)]
    loaded: list[tuple[int, int]] = []
    loaded_slots: list[int] = []
    rest = iter(slots)
    for start, size in stored:
        mine = [next(rest) for _ in range(size // n)]
        first = draw(st.integers(0, size))
        stop = draw(st.integers(first, size))
        loaded.append((start + first, stop - first))
        loaded_slots += mine[first // n : -(-stop // n)] if stop > first else []
    return Case(
        shape,
        draw(st.integers(1, 3)),
        draw(st.booleans()),
        _over(draw, stored, slots),
        _over(draw, loaded, loaded_slots),
        draw(st.integers(0, 1 << 30)),
    )


def _over(draw: st.DrawFn, groups: list[tuple[int, int]], slots: list[int]) -> Transfer:
    """Any distinct blocks for the groups' (block index, number of blocks), often in runs."""
    free = list(range(NUM_BLOCKS))
    if draw(st.booleans()):
        free = draw(st.permutations(free))
    taken: list[tuple[int, list[int]]] = []
    for index, size in groups:
        taken.append((index, free[:size]))
        free = free[size:]
    return Transfer(taken, slots)


def open_arena(slices: int, shape: Shape) -> SharedArena:
    """Slots for that many ranks' slices, full of bytes that nobody wrote."""
    slot_bytes = -(-slices * shape.rank_bytes // 4096) * 4096
    arena = SharedArena(slot_bytes, NUM_SLOTS)
    arena.buffer[:] = os.urandom(len(arena.buffer))
    return arena


def worker_on(
    device: Device,
    layout: PageLayout,
    *,
    in_flight_bytes: int = 1 << 30,
    cuda: CudaRuntime | None = None,
) -> SlotWorker:
    """One whose buffers have room for the largest chunk and no more."""
    largest = max(kv.chunk_bytes(layout.blocks_per_chunk) for kv in layout.groups)
    copies = Copies(device, staging_bytes=aligned(largest), in_flight_bytes=in_flight_bytes)
    return SlotWorker(layout, copies, cuda)


def cpu_worker(layout: PageLayout) -> SlotWorker:
    return worker_on(CpuDevice(), layout)


def check_round_trip(case: Case, make: MakeWorker, finish: Callable[[], None]) -> None:
    """Store from every rank, wipe every page, load into other pages: every byte of the arena and
    of the caches must be what the model says. finish() ends what a worker has under way."""
    shape, shared = case.shape, case.replicated
    caches = [Cache(shape, case.seed + (0 if shared else rank)) for rank in range(case.ranks)]
    workers = [make(c.layout(rank, replicated=shared)) for rank, c in enumerate(caches)]
    arena = open_arena(1 if shared else case.ranks, shape)
    expected = np.frombuffer(bytes(arena.buffer), np.uint8).copy()
    slices = [0 if shared else rank * shape.rank_bytes for rank in range(case.ranks)]
    for worker, cache, start in zip(workers, caches, slices, strict=True):
        for tensor, page, at, size in case.stored.places(cache, arena.slot_bytes, start):
            expected[at : at + size] = cache.memory[tensor][page : page + size]
        assert worker.submit_store(1, case.stored.pages, case.stored.into(arena))
    finish()
    assert bytes(arena.buffer) == expected.tobytes()
    for worker, cache, start in zip(workers, caches, slices, strict=True):
        cache.fill(case.seed + 1000)
        wanted = [memory.copy() for memory in cache.memory]
        for tensor, page, at, size in case.loaded.places(cache, arena.slot_bytes, start):
            wanted[tensor][page : page + size] = expected[at : at + size]
        assert worker.submit_load(2, case.loaded.into(arena), case.loaded.pages)
        finish()
        assert [m.tobytes() for m in cache.memory] == [m.tobytes() for m in wanted]
        results = worker.get_finished()
        assert [(r.job_id, r.success) for r in results] == [(1, True), (2, True)]
        assert [r.transfer_size for r in results] == [
            transfer.num_bytes(cache) for transfer in (case.stored, case.loaded)
        ]
        assert worker.get_finished() == []
    assert bytes(arena.buffer) == expected.tobytes()
    for worker in workers:
        worker.shutdown()
    arena.close()
