"""Transfers on a GPU: two streams beside the engine's own, one for stores and one for loads.

A stream does its work in order, so one staging buffer per stream is enough: a chunk is gathered
into it when the chunk before was copied out of it, and the other way round.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from vllm.v1.kv_offload.base import TransferResult

from ...tiers.arena import ArenaMapping
from .cuda_device import Device, Event, Stream
from .pages import ChunkCopy, PageLayout, RefPages
from .worker import SlotWorker

_log = logging.getLogger(__name__)
_PIECE_BYTES = 1 << 30
"""Pinned per call: the driver may hold up the engine's launches for as long as one call takes."""


@dataclass(frozen=True, slots=True)
class _Job:
    start: Event
    end: Event
    moved_bytes: int


class CudaWorker(SlotWorker):
    """Owns both streams and staging buffers, and a transfer's pages and slots until its end."""

    def __init__(self, layout: PageLayout, device: Device) -> None:
        super().__init__(layout)
        self._device = device
        # A load has a request waiting for it; a store has nobody.
        self._stores, self._loads = device.stream(urgent=False), device.stream(urgent=True)
        place = layout.groups[0][0].pages.device
        gathered, arrived = torch.empty(
            (2, max(layout.group_bytes)), dtype=torch.uint8, device=place
        )
        self._gathered, self._arrived = gathered, arrived
        self._gathers = [[self._rows(ref, gathered) for ref in refs] for refs in layout.groups]
        self._scatters = [[self._rows(ref, arrived) for ref in refs] for refs in layout.groups]
        self._jobs: dict[int, _Job] = {}
        self._slots: torch.Tensor | None = None
        self._pinner: MappingPinner | None = None

    def get_finished(self) -> list[TransferResult]:
        done = [job_id for job_id, job in self._jobs.items() if job.end.query()]
        return [_result(job_id, self._jobs.pop(job_id)) for job_id in done]

    def wait(self, job_ids: set[int]) -> None:
        for job_id in job_ids & self._jobs.keys():
            self._jobs[job_id].end.synchronize()

    def _store(self, job_id: int, copies: Sequence[ChunkCopy]) -> None:
        # Store stream waits for compute: the KV must be written.
        self._stores.wait(self._device.compute_event())
        self._run(job_id, self._stores, self._store_chunk, copies)

    def _load(self, job_id: int, copies: Sequence[ChunkCopy]) -> None:
        # Load stream waits for compute: kernels in flight may still touch these pages.
        self._loads.wait(self._device.compute_event())
        self._run(job_id, self._loads, self._load_chunk, copies)

    def _run(
        self,
        job_id: int,
        stream: Stream,
        move: Callable[[ChunkCopy], None],
        copies: Sequence[ChunkCopy],
    ) -> None:
        start = stream.record()
        for copy in copies:
            stream.run(partial(move, copy))
        self._jobs[job_id] = _Job(start, stream.record(), self._layout.moved_bytes(copies))

    def _store_chunk(self, copy: ChunkCopy) -> None:
        indices = self._device.indices(torch.from_numpy(copy.blocks))
        for pages, staged in self._gathers[copy.group]:
            torch.index_select(pages, 0, indices, out=staged)
        slot = self._slot(copy)
        slot.copy_(self._gathered[: len(slot)], non_blocking=True)

    def _load_chunk(self, copy: ChunkCopy) -> None:
        slot = self._slot(copy)
        self._arrived[: len(slot)].copy_(slot, non_blocking=True)
        indices = self._device.indices(torch.from_numpy(copy.blocks))
        stop = copy.first + len(copy.blocks)
        for pages, staged in self._scatters[copy.group]:
            pages.index_copy_(0, indices, staged[copy.first : stop])

    def _slot(self, copy: ChunkCopy) -> torch.Tensor:
        """This rank's bytes of the chunk."""
        assert self._slots is not None
        start = self._layout.slice_start
        return self._slots[copy.slot, start : start + self._layout.group_bytes[copy.group]]

    def _rows(self, ref: RefPages, staging: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The ref's pages and its part of a staging buffer, in the widest integers that fit."""
        num_pages, page_bytes = self._layout.blocks_per_chunk, ref.pages.shape[1]
        staged = staging[ref.offset : ref.offset + num_pages * page_bytes]
        pair = ref.pages, staged.view(num_pages, page_bytes)
        starts = [at for rows in pair for at in (rows.data_ptr(), rows.storage_offset())]
        if any(size % 8 for size in (page_bytes, ref.pages.stride(0), *starts)):
            return pair
        return pair[0].view(torch.int64), pair[1].view(torch.int64)

    def _attached(self, mapping: ArenaMapping) -> None:
        flat = torch.frombuffer(mapping.buffer, dtype=torch.uint8)
        self._slots = flat.view(mapping.num_slots, mapping.slot_bytes)
        self._pinner = MappingPinner(mapping, self._device)

    def _detach(self) -> None:
        self.wait(set(self._jobs))
        self._slots = None
        if self._pinner is not None:
            self._pinner.close()
            self._pinner = None


class MappingPinner:
    """Pins a mapping in the background; until it is done, copies are slower but right."""

    def __init__(self, mapping: ArenaMapping, device: Device) -> None:
        self._device = device
        self._closing = False
        self._pinned: list[int] = []
        # Pieces end between slots: CUDA refuses a copy that lies in two of them.
        self._piece_bytes = max(1, _PIECE_BYTES // mapping.slot_bytes) * mapping.slot_bytes
        self._start = mapping.address
        self._size_bytes = mapping.num_slots * mapping.slot_bytes
        self._thread = threading.Thread(target=self._run, name="rootcellar-pin", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Unpin everything; waits for one piece at most. Idempotent."""
        self._closing = True
        self._thread.join()
        while self._pinned:
            self._device.unpin(self._pinned.pop())

    def _run(self) -> None:
        for offset in range(0, self._size_bytes, self._piece_bytes):
            if self._closing:
                return
            size_bytes = min(self._piece_bytes, self._size_bytes - offset)
            code = self._device.pin(self._start + offset, size_bytes)
            if code != 0:
                _log.warning("DRAM is not pinned from byte %d on: CUDA error %d", offset, code)
                return
            self._pinned.append(self._start + offset)


def _result(job_id: int, job: _Job) -> TransferResult:
    taken_s = job.start.elapsed_time(job.end) / 1000
    return TransferResult(job_id, True, job.moved_bytes, taken_s)
