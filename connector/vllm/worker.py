"""The worker's side of a transfer: the engine's pages and the slots of the shared arena.

A transfer is checked before a byte moves, and what does not fit raises: it is a bug of ours.
Whatever else stops a transfer costs its chunks, not the engine. How bytes move, on a CPU or a GPU,
is the tiers' transfer.
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from ...tiers.arena import ArenaAddress
from ...tiers.cuda_runtime import CudaRuntime, TorchRuntime
from ...tiers.device import device_of
from ...tiers.movers import ChunkCopy, row_bytes
from ...tiers.pinning import ArenaPinner
from ...tiers.transfer import CopyJob, Transfer
from .pages import PageLayout
from .partial import fills_chunks
from .slots import SlotSpec

_log = logging.getLogger(__name__)

MIN_STAGING_BYTES = 16 << 20
"""Of a staging buffer, if no chunk is larger. A transfer has four, in HBM that vLLM has not set
aside; more would gain nothing: this much is on the link for far longer than a launch takes."""


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
    tensors = [cache.tensor for cache in kv_caches.tensors]
    place = tensors[0].device
    transfer = Transfer(device_of(tensors), staging_bytes=_staging_bytes(layout))
    worker = SlotWorker(layout, transfer, TorchRuntime(place) if place.type == "cuda" else None)
    worker.warm_up()
    return worker


class SlotWorker(OffloadingWorker):
    """Owns the transfer, and the mapping of the arena that a job names: when a worker is made, the
    store of the scheduler does not exist yet.

    vLLM's scheduler keeps a job's pages and slots from any other use until get_finished() has told
    of the job, or wait() for it has returned.
    """

    def __init__(
        self, layout: PageLayout, transfer: Transfer, cuda: CudaRuntime | None = None
    ) -> None:
        """cuda: pins the arena, where there is a GPU to read and write it."""
        self._layout = layout
        self._transfer = transfer
        self._cuda = cuda
        self._job_ids: dict[CopyJob, int] = {}
        self._not_begun: list[int] = []
        """Jobs of which nothing is under way, or will be: get_finished() tells of them."""
        self.failed_jobs: set[int] = set()
        """That get_finished() told of, until taken: their pages or slots may hold anything."""
        self._address: ArenaAddress | None = None
        self._slots = torch.empty((0, 0), dtype=torch.uint8)
        """(num_slots, slot_bytes): all of the mapping."""
        self._release = ExitStack()
        """Lets go of the mapping, its registration first."""

    def warm_up(self) -> None:
        """Move a chunk of every group both ways, and wait: what must be compiled or is missing
        shows when the engine starts, not under its first request.

        Before anything else uses block 0, which keeps what it holds.
        """
        n, block_0 = self._layout.blocks_per_chunk, np.zeros(1, np.int64)
        for kv in self._layout.groups:
            slot = torch.empty(kv.chunk_bytes(n), dtype=torch.uint8)
            stored = self._transfer.store([ChunkCopy(kv, block_0.repeat(n), slot, n)])
            self._transfer.wait([stored])
            if stored.error is not None:
                raise stored.error
            self._transfer.wait([self._transfer.load([ChunkCopy(kv, block_0, slot, n)])])
        self._transfer.poll()

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        # vLLM submits a store in the step after the one that computed its pages, on the thread
        # whose current stream runs the model: all that writes them has been launched there.
        assert isinstance(dst_spec, SlotSpec)
        if not fills_chunks(src_spec, dst_spec, self._layout.blocks_per_chunk):
            raise ValueError(
                f"a store of {len(src_spec.block_ids)} blocks does not fill its "
                f"{len(dst_spec.slots)} chunks of {self._layout.blocks_per_chunk} blocks"
            )
        self._begin(job_id, self._transfer.store, src_spec, dst_spec)
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        # The request runs in a step after get_finished() has told of the load, so that no layer
        # waits for its own. What still zeroes these pages has been launched on the same stream.
        assert isinstance(src_spec, SlotSpec)
        self._begin(job_id, self._transfer.load, dst_spec, src_spec)
        return True

    def get_finished(self) -> list[TransferResult]:
        # vLLM asks in every step, and has steps without requests until all jobs are told of: so
        # stores that are not launched yet get their turn.
        ended = [(self._job_ids.pop(job), job) for job in self._transfer.poll()]
        failed = self._not_begun + [job_id for job_id, job in ended if job.error is not None]
        self._not_begun.clear()
        self.failed_jobs.update(failed)
        # vLLM would stop at anything but a success: to it, that a job has ended is one.
        return [TransferResult(job_id, True) for job_id in failed] + [
            TransferResult(job_id, True, job.num_bytes, job.taken_s)
            for job_id, job in ended
            if job.error is None
        ]

    def take_failed(self) -> set[int]:
        """Those that failed since the last call."""
        failed, self.failed_jobs = self.failed_jobs, set()
        return failed

    def wait(self, job_ids: set[int]) -> None:
        # Called before a step that writes pages of these jobs; some may have been told of.
        self._transfer.wait([job for job, job_id in self._job_ids.items() if job_id in job_ids])

    def shutdown(self) -> None:
        """Finish what is under way and let go of everything, also after errors. Idempotent."""
        try:
            self._transfer.close()
            self._transfer.poll()  # jobs keep the mapping, and nobody asks for them any more
        finally:
            self._job_ids.clear()
            self._not_begun.clear()
            self._detach()

    def _begin(
        self,
        job_id: int,
        begin: Callable[[list[ChunkCopy]], CopyJob],
        blocks: GPULoadStoreSpec,
        slots: SlotSpec,
    ) -> None:
        try:
            job = begin(self._copies(blocks, slots))
        except ValueError:  # they do not fit together
            raise
        except Exception:
            # The engine has its KV, or can compute it: only the transfer is lost.
            _log.exception("a transfer was given up")
            self._not_begun.append(job_id)
        else:
            self._job_ids[job] = job_id

    def _copies(self, blocks: GPULoadStoreSpec, slots: SlotSpec) -> list[ChunkCopy]:
        if slots.arena != self._address:
            self._attach(slots.arena)
        return self._layout.copies(blocks, slots, self._slots)

    def _attach(self, address: ArenaAddress) -> None:
        """TierError if this process cannot map the arena: no transfer can be done then."""
        if address.slot_bytes < self._layout.slice_stop:
            raise ValueError(
                f"slots have {address.slot_bytes} bytes, this rank needs {self._layout.slice_stop}"
            )
        mapping = address.attach()
        # Copies of the arena before must end: its memory is about to be unpinned.
        self._transfer.wait(list(self._job_ids))
        self._detach()
        self._release.callback(mapping.close)
        if self._cuda is not None:
            self._release.callback(ArenaPinner(mapping, self._cuda).close)
        # Through numpy: its arrays keep the memory mapped, torch.frombuffer's tensors do not.
        flat = torch.from_numpy(np.frombuffer(mapping.buffer, np.uint8))
        self._slots = flat.view(mapping.num_slots, mapping.slot_bytes)
        self._address = address

    def _detach(self) -> None:
        self._slots, self._address = self._slots.new_empty((0, 0)), None
        self._release.close()


def _staging_bytes(layout: PageLayout) -> int:
    n = layout.blocks_per_chunk
    return max(
        MIN_STAGING_BYTES, *(row_bytes(kv, n, range(len(kv.planes))) for kv in layout.groups)
    )
