"""The worker's side of a transfer: the engine's pages and the slots of the shared arena.

Both devices check a transfer before a byte moves, and what does not fit raises: it is a bug of
ours, and the engine has no way to be told that a transfer failed.
"""

import time
from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from ...tiers.arena import ArenaAddress, ArenaMapping
from .pages import ChunkCopy, PageLayout, RefPages, page_runs
from .partial import fills_chunks
from .slots import SlotSpec

Bytes = npt.NDArray[np.uint8]


def make_worker(
    kv_caches: CanonicalKVCaches,
    *,
    blocks_per_chunk: int,
    rank: int,
    rank_bytes: int,
    replicated: bool,
) -> OffloadingWorker:
    """The worker for the device that the KV cache lies on.

    rank_bytes: one rank's slice of a slot; replicated: all ranks hold the same bytes, and the
    first slice is everyone's. ValueError if a chunk does not fit in a slice, or if there is no
    worker for the device.
    """
    layout = PageLayout(
        kv_caches,
        blocks_per_chunk=blocks_per_chunk,
        rank=rank,
        rank_bytes=rank_bytes,
        replicated=replicated,
    )
    device = kv_caches.tensors[0].tensor.device
    if device.type == "cpu":
        return CpuWorker(layout)
    if device.type == "cuda":
        from .cuda_device import TorchCuda
        from .cuda_worker import CudaWorker  # it builds on this file

        return CudaWorker(layout, TorchCuda(device))
    raise ValueError(f"the KV cache is on {device}, must be on cpu or cuda")


class SlotWorker(OffloadingWorker):
    """Attaches the arena that a transfer names: when a worker is made, the store of the scheduler
    does not exist yet."""

    def __init__(self, layout: PageLayout) -> None:
        self._layout = layout
        self._address: ArenaAddress | None = None
        self._mapping: ArenaMapping | None = None

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        assert isinstance(dst_spec, SlotSpec)
        if not fills_chunks(src_spec, dst_spec, self._layout.blocks_per_chunk):
            raise ValueError(
                f"a store of {len(src_spec.block_ids)} blocks does not fill its "
                f"{len(dst_spec.slots)} chunks of {self._layout.blocks_per_chunk} blocks"
            )
        self._store(job_id, self._checked(src_spec, dst_spec))
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        assert isinstance(src_spec, SlotSpec)
        self._load(job_id, self._checked(dst_spec, src_spec))
        return True

    def shutdown(self) -> None:
        """Let go of the arena. Idempotent."""
        if self._mapping is not None:
            self._detach()
            self._mapping.close()
            self._mapping = self._address = None

    @abstractmethod
    def _store(self, job_id: int, copies: Sequence[ChunkCopy]) -> None:
        """Pages to slots."""

    @abstractmethod
    def _load(self, job_id: int, copies: Sequence[ChunkCopy]) -> None:
        """Slots to pages."""

    @abstractmethod
    def _attached(self, mapping: ArenaMapping) -> None:
        """Transfers use `mapping` from now on, until _detach."""

    @abstractmethod
    def _detach(self) -> None:
        """Finish what uses the mapping and drop every view of it."""

    def _checked(self, blocks: GPULoadStoreSpec, slots: SlotSpec) -> list[ChunkCopy]:
        copies = self._layout.copies(blocks, slots)
        if slots.arena != self._address:
            self._attach(slots.arena)
        return copies

    def _attach(self, address: ArenaAddress) -> None:
        """TierError if this process cannot map the arena: no transfer can be done then, and there
        is no answer but to raise that the engine would not take for success."""
        if address.slot_bytes < self._layout.slice_stop:
            raise ValueError(
                f"slots have {address.slot_bytes} bytes, this rank needs {self._layout.slice_stop}"
            )
        mapping = address.attach()
        self.shutdown()
        self._address, self._mapping = address, mapping
        self._attached(mapping)


class CpuWorker(SlotWorker):
    """The KV cache is in main memory: a transfer is done when its submit returns."""

    def __init__(self, layout: PageLayout) -> None:
        super().__init__(layout)
        self._cells: list[list[tuple[Bytes, Bytes]]] = []
        self._finished: list[TransferResult] = []

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way."""

    def _store(self, job_id: int, copies: Sequence[ChunkCopy]) -> None:
        started_s = time.perf_counter()
        for copy in copies:
            runs = page_runs(copy)
            for pages, slots in self._cells[copy.group]:
                chunk = slots[copy.slot]
                for page, block, count in runs:
                    chunk[page : page + count] = pages[block : block + count]
        self._finish(job_id, copies, started_s)

    def _load(self, job_id: int, copies: Sequence[ChunkCopy]) -> None:
        started_s = time.perf_counter()
        for copy in copies:
            runs = page_runs(copy)
            for pages, slots in self._cells[copy.group]:
                chunk = slots[copy.slot]
                for page, block, count in runs:
                    pages[block : block + count] = chunk[page : page + count]
        self._finish(job_id, copies, started_s)

    def _finish(self, job_id: int, copies: Sequence[ChunkCopy], started_s: float) -> None:
        moved_bytes = self._layout.moved_bytes(copies)
        taken_s = time.perf_counter() - started_s
        self._finished.append(TransferResult(job_id, True, moved_bytes, taken_s))

    def _attached(self, mapping: ArenaMapping) -> None:
        self._cells = [
            [(ref.pages.numpy(), self._slots_of(ref, mapping)) for ref in refs]
            for refs in self._layout.groups
        ]

    def _detach(self) -> None:
        self._cells = []

    def _slots_of(self, ref: RefPages, mapping: ArenaMapping) -> Bytes:
        """(num_slots, blocks_per_chunk, page_bytes): the ref's pages in every slot."""
        page_bytes = ref.pages.shape[1]
        return as_strided(
            np.frombuffer(mapping.buffer, np.uint8)[self._layout.slice_start + ref.offset :],
            (mapping.num_slots, self._layout.blocks_per_chunk, page_bytes),
            (mapping.slot_bytes, page_bytes, 1),
        )
