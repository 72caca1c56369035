"""An engine on a toy device: pages, kernels that write and read them, and slots.

`model` is what the pages hold once all that was launched is done, in the order of the program. A
kernel that reads compares pages with what the model said when it was launched.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from rootcellar.kernels.paged import PagedKV
from rootcellar.tiers import batches, movers
from rootcellar.tiers.movers import ChunkCopy
from rootcellar.tiers.toy_device import ToyDevice, ToyStream

LAYERS, PAGES, PAGE_BYTES = 3, 16, 4
PER_CHUNK = 2
CHUNK_BYTES = LAYERS * 2 * PER_CHUNK * PAGE_BYTES
SLOTS = 8
ROW_BYTES = 256  # what a chunk takes in a staging buffer


class Race(AssertionError):
    """Somebody read or wrote too early or too late."""


class ToyEngine:
    def __init__(self, device: ToyDevice) -> None:
        self.device = device
        pool = torch.zeros((LAYERS, 2, PAGES, 1, PAGE_BYTES), dtype=torch.uint8)
        self.kv = PagedKV.of_slots(pool)
        self.pages = pool[:, :, :, 0].numpy()
        self.model = self.pages.copy()
        self.slots = torch.zeros((SLOTS, CHUNK_BYTES), dtype=torch.uint8)

    def write(self, pages: Sequence[int], seed: int, stream: ToyStream | None = None) -> None:
        """Launch a kernel that writes those pages."""
        shape = (LAYERS, 2, len(pages), PAGE_BYTES)
        content = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
        self.model[:, :, pages] = content

        def kernel() -> None:
            self.pages[:, :, pages] = content

        (stream or self.device.compute).run(kernel)

    def read(
        self,
        pages: Sequence[int],
        stream: ToyStream | None = None,
        layers: slice = slice(None),
    ) -> None:
        """Launch a kernel that reads those pages."""
        expected = self.model[layers][:, :, pages]

        def kernel() -> None:
            expect(self.pages[layers][:, :, pages].tobytes(), expected.tobytes(), "pages")

        (stream or self.device.compute).run(kernel)

    def copy(self, pages: Sequence[int], slot: int, first: int = 0) -> ChunkCopy:
        return ChunkCopy(self.kv, np.array(pages, np.int64), self.slots[slot], PER_CHUNK, first)

    def chunk(self, pages: Sequence[int]) -> bytes:
        """As it lies in a slot."""
        return self.model[:, :, pages].tobytes()

    def slot(self, slot: int) -> bytes:
        return self.slots[slot].numpy().tobytes()

    def load_model(self, pages: Sequence[int], chunk: bytes, first: int = 0) -> None:
        """Those pages will hold that part of the chunk."""
        content = np.frombuffer(chunk, np.uint8).reshape(LAYERS, 2, PER_CHUNK, PAGE_BYTES)
        self.model[:, :, pages] = content[:, :, first : first + len(pages)]


def expect(actual: bytes, expected: bytes, what: str) -> None:
    if actual != expected:
        raise Race(f"{what} are {actual.hex()}, expected {expected.hex()}")


@contextmanager
def small_limits() -> Iterator[None]:
    """Every layer arrives alone, and no page is too small for a batch of copies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "LAYER_BYTES", 1)
        patch.setattr(movers, "BATCHED_FROM_BYTES", 1)
        yield


def set_mover(device: ToyDevice, mover: str) -> None:
    device.in_place = mover == "in place"
    device.can_batch = mover == "batched"
