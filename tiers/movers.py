"""Three ways from an engine's pages to slots and back, behind one interface.

    InPlace   pages <-> slot                   where kernels reach slots: main memory
    Batched   pages <-> slot                   many DMA copies in one call; pages must be large
    Staged    pages <-> staging <-> slot       one kernel, then one large copy over the link

All of it is launched on the stream of the lane that is given, which alone keeps it in order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from ..kernels import gather, scatter
from ..kernels.cpu import gather_chunk, scatter_chunk
from ..kernels.paged import PagedKV
from .device import Device, Stream
from .dma import Spans
from .planes import Integers, part_bytes, planes_of

BATCHED_FROM_BYTES = 256 << 10
"""Pages of at least this size go over the link by themselves."""

Bytes = npt.NDArray[np.uint8]
Rows = Sequence[torch.Tensor]
CopyRows = Callable[[Rows, Rows], None]
"""(targets, sources), rows of bytes, as many and as long on either side."""

_ALIGNED = 256  # of rows in a staging buffer, so that kernels move their widest words


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ChunkCopy:
    """Page pages[i] of `kv` is page first + i of the chunk in `slot`.

    slot: (chunk_bytes,) uint8 in main memory.
    """

    kv: PagedKV
    pages: Integers
    slot: torch.Tensor
    pages_per_chunk: int
    first: int = 0

    @property
    def num_bytes(self) -> int:
        return self.kv.chunk_bytes(len(self.pages))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Batch:
    """Copies that share kv and pages_per_chunk, and which of the planes to move."""

    copies: Sequence[ChunkCopy]
    planes: range

    @property
    def kv(self) -> PagedKV:
        return self.copies[0].kv

    @property
    def pages_per_chunk(self) -> int:
        return self.copies[0].pages_per_chunk

    @property
    def num_bytes(self) -> int:
        num_pages = sum(len(copy.pages) for copy in self.copies)
        return part_bytes(self.kv, num_pages, self.planes)

    def parts(self) -> list[torch.Tensor]:
        """The bytes of each slot that hold these planes; they lie together."""
        start = part_bytes(self.kv, self.pages_per_chunk, range(self.planes.start))
        size = part_bytes(self.kv, self.pages_per_chunk, self.planes)
        return [copy.slot[start : start + size] for copy in self.copies]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Lane:
    """A stream and a buffer that only its work touches."""

    stream: Stream
    staging: torch.Tensor

    def rows(self, num_rows: int, size_bytes: int) -> torch.Tensor:
        """(num_rows, size_bytes) of the buffer."""
        pitch = aligned(size_bytes)
        return self.staging[: num_rows * pitch].view(num_rows, pitch)[:, :size_bytes]


class Mover(Protocol):
    """Launches on the lane's stream; what a launch raises comes through, and may leave others."""

    def store(self, lane: Lane, batch: Batch) -> None:
        """Pages to slots."""

    def load(self, lane: Lane, batch: Batch) -> None:
        """Slots to pages."""


class InPlace:
    """Both ends are in main memory: one look at all of a batch serves every copy."""

    def store(self, lane: Lane, batch: Batch) -> None:
        kv, parts = _checked_parts(batch)
        for copy, part in zip(batch.copies, parts, strict=True):
            n, first = copy.pages_per_chunk, copy.first
            lane.stream.run(partial(gather_chunk, kv, copy.pages, part, n, first))

    def load(self, lane: Lane, batch: Batch) -> None:
        kv, parts = _checked_parts(batch)
        for copy, part in zip(batch.copies, parts, strict=True):
            n, first = copy.pages_per_chunk, copy.first
            lane.stream.run(partial(scatter_chunk, part, kv, copy.pages, n, first))


class Staged:
    """The stream's order makes one buffer a lane enough: it is filled when the copy before is out
    of it. Launched apart, so that a device that orders them otherwise is caught.

    over_link: copies rows of a buffer to as many slots, or back.
    """

    def __init__(self, over_link: CopyRows) -> None:
        self._over_link = over_link

    def store(self, lane: Lane, batch: Batch) -> None:
        parts = batch.parts()
        staged = lane.rows(len(parts), len(parts[0]))
        lane.stream.run(partial(_gather, batch, staged))
        lane.stream.run(partial(self._over_link, parts, list(staged)))

    def load(self, lane: Lane, batch: Batch) -> None:
        parts = batch.parts()
        staged = lane.rows(len(parts), len(parts[0]))
        lane.stream.run(partial(self._over_link, list(staged), parts))
        lane.stream.run(partial(_scatter, staged, batch))


class Batched:
    def __init__(self, device: Device) -> None:
        self._device = device

    def store(self, lane: Lane, batch: Batch) -> None:
        in_pages, in_slots, sizes = _ends(batch)
        lane.stream.run(partial(self._device.copy_spans, Spans(in_pages, in_slots, sizes)))

    def load(self, lane: Lane, batch: Batch) -> None:
        in_pages, in_slots, sizes = _ends(batch)
        lane.stream.run(partial(self._device.copy_spans, Spans(in_slots, in_pages, sizes)))


def mover_for(device: Device, kv: PagedKV, *, pinned: bool) -> Mover:
    """The fastest for these pages. pinned: whether all slots are, by device.is_pinned()."""
    if device.in_place:
        return InPlace()
    if not (pinned and device.can_batch):
        return Staged(copy_each)
    if planes_of(kv).packed_page_bytes >= BATCHED_FROM_BYTES:
        return Batched(device)
    return Staged(partial(copy_at_once, device))


def copy_each(targets: Rows, sources: Rows) -> None:
    """On the stream that runs; waits for the device where memory is not pinned."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)


def copy_at_once(device: Device, targets: Rows, sources: Rows) -> None:
    """The same of pinned memory, in one call: thousands would hold up the engine's thread."""
    ends = ([row.data_ptr() for row in rows] for rows in (sources, targets))
    sizes = [len(row) for row in targets]
    device.copy_spans(Spans(*(np.array(numbers, np.int64) for numbers in (*ends, sizes))))


def row_bytes(kv: PagedKV, pages_per_chunk: int, planes: range) -> int:
    """What a chunk takes in a staging buffer."""
    return aligned(part_bytes(kv, pages_per_chunk, planes))


def aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNED) * _ALIGNED


def _gather(batch: Batch, chunks: torch.Tensor) -> None:
    gather(
        batch.kv,
        _pages(batch),
        chunks,
        pages_per_chunk=batch.pages_per_chunk,
        places=_places(batch),
        planes=batch.planes,
    )


def _scatter(chunks: torch.Tensor, batch: Batch) -> None:
    scatter(
        chunks,
        batch.kv,
        _pages(batch),
        pages_per_chunk=batch.pages_per_chunk,
        places=_places(batch),
        planes=batch.planes,
    )


def _checked_parts(batch: Batch) -> tuple[PagedKV, list[Bytes]]:
    """The planes to move, and of each slot the bytes from where they begin."""
    _check(batch, _pages(batch))
    every = batch.planes == range(len(batch.kv.planes))
    kv = batch.kv if every else batch.kv.part(batch.planes)
    start = part_bytes(batch.kv, batch.pages_per_chunk, range(batch.planes.start))
    return kv, [copy.slot.numpy()[start:] for copy in batch.copies]


def _pages(batch: Batch) -> Integers:
    return np.concatenate([copy.pages for copy in batch.copies])


def _places(batch: Batch) -> Integers:
    starts = (i * batch.pages_per_chunk + copy.first for i, copy in enumerate(batch.copies))
    runs = zip(starts, batch.copies, strict=True)
    return np.concatenate([np.arange(start, start + len(copy.pages)) for start, copy in runs])


def _ends(batch: Batch) -> tuple[Integers, Integers, Integers]:
    """Of every page of every plane: its address, that in its slot, and its size."""
    planes, chosen = planes_of(batch.kv), slice(batch.planes.start, batch.planes.stop)
    pages, (slots, places) = _pages(batch), _in_slots(batch)
    _check(batch, pages)
    sizes = planes.sizes[chosen, None]
    starts = batch.pages_per_chunk * planes.starts[chosen, None]
    in_pages = planes.addresses[chosen, None] + pages * planes.pitches[chosen, None]
    in_slots = slots + starts + places * sizes
    return in_pages.ravel(), in_slots.ravel(), np.broadcast_to(sizes, in_slots.shape).ravel()


def _in_slots(batch: Batch) -> tuple[Integers, Integers]:
    """Of every page: the address of its slot, and which page of the chunk it is."""
    counts = [len(copy.pages) for copy in batch.copies]
    slots = np.repeat([copy.slot.data_ptr() for copy in batch.copies], counts)
    firsts = [np.arange(c.first, c.first + n) for c, n in zip(batch.copies, counts, strict=True)]
    return slots, np.concatenate(firsts)


def _check(batch: Batch, pages: Integers) -> None:
    """What kernels look at by themselves: a batch of copies writes wherever it is told to."""
    whole_bytes = part_bytes(batch.kv, batch.pages_per_chunk, range(len(batch.kv.planes)))
    for copy in batch.copies:
        if len(copy.slot) < whole_bytes:
            raise ValueError(f"a slot of {len(copy.slot)} bytes, must be at least {whole_bytes}")
        if not 0 <= copy.first <= batch.pages_per_chunk - len(copy.pages):
            raise ValueError(
                f"{len(copy.pages)} pages from {copy.first} on, must be in {batch.pages_per_chunk}"
            )
    if len(pages) and not 0 <= pages.min() <= pages.max() < batch.kv.num_pages:
        raise ValueError(
            f"pages are {pages.min()} to {pages.max()}, must be from 0 to {batch.kv.num_pages - 1}"
        )
