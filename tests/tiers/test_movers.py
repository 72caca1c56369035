"""The three ways between pages and slots, each against a loop over single bytes."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from random import Random
from typing import Any

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings

from rootcellar.kernels.paged import PagedKV
from rootcellar.tiers import movers
from rootcellar.tiers.device import CpuDevice
from rootcellar.tiers.dma import Spans
from rootcellar.tiers.movers import (
    Batch,
    Batched,
    ChunkCopy,
    InPlace,
    Lane,
    Mover,
    Staged,
    copy_at_once,
    copy_each,
    mover_for,
    row_bytes,
)
from rootcellar.tiers.planes import part_bytes
from rootcellar.tiers.toy_device import ToyDevice

PAGES = 7
Bytes = npt.NDArray[np.uint8]


def _slots() -> PagedKV:
    return PagedKV.of_slots(torch.zeros(2, 2, PAGES, 3, 4, dtype=torch.int16))


def _heads() -> PagedKV:
    """Pages that are not packed: a page's heads lie apart."""
    return PagedKV.of_heads([[torch.zeros(1, 3, PAGES, 2) for _ in range(2)] for _ in range(3)])


def _rows() -> PagedKV:
    """Pages of several sizes, with other bytes between them."""
    widths = (5, 16, 3)
    return PagedKV.of_rows([torch.zeros(PAGES, w + 4, dtype=torch.uint8)[:, :w] for w in widths])


@st.composite
def batches(draw: st.DrawFn, make: Callable[[], PagedKV], *, whole: bool) -> Batch:
    """Chunks of random pages and bytes, of some planes or all."""
    kv = make()
    random = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    for plane in kv.planes:
        plane.copy_(torch.from_numpy(random.integers(0, 256, plane.shape, np.uint8)))
    per_chunk = draw(st.integers(1, 4))
    slot_bytes = part_bytes(kv, per_chunk, range(len(kv.planes)))
    left, copies = draw(st.permutations(range(PAGES))), list[ChunkCopy]()
    for _ in range(draw(st.integers(1, PAGES // per_chunk))):
        first = 0 if whole else draw(st.integers(0, per_chunk - 1))
        count = per_chunk if whole else draw(st.integers(0, per_chunk - first))
        pages, left = left[:count], left[count:]
        slot = torch.from_numpy(random.integers(0, 256, slot_bytes, np.uint8))
        copies.append(ChunkCopy(kv, np.array(pages, np.int64), slot, per_chunk, first))
    start = draw(st.integers(0, len(kv.planes) - 1))
    return Batch(copies, range(start, draw(st.integers(start + 1, len(kv.planes)))))


def _contents(batch: Batch) -> list[Bytes]:
    """Of every plane, then of every slot."""
    return [t.numpy().copy() for t in (*batch.kv.planes, *(copy.slot for copy in batch.copies))]


def _moved_one_by_one(batch: Batch, verb: str) -> list[Bytes]:
    """What _contents shall be: a loop over pages that follows the docstrings."""
    contents = _contents(batch)
    for number, copy in enumerate(batch.copies, len(batch.kv.planes)):
        at = 0
        for index, plane in enumerate(batch.kv.planes):
            size = plane[0].numel()
            for place, page in enumerate(copy.pages.tolist(), copy.first):
                there, here = contents[number][at + place * size :][:size], contents[index][page]
                if index in batch.planes and verb == "store":
                    there[:] = here.ravel()
                elif index in batch.planes:
                    here[:] = there.reshape(here.shape)
            at += size * batch.pages_per_chunk
    return contents


def _mover(name: str, device: ToyDevice) -> Mover:
    by_name: dict[str, Mover] = {
        "in place": InPlace(),
        "staged": Staged(copy_each),
        "staged at once": Staged(partial(copy_at_once, device)),
        "batched": Batched(device),
    }
    return by_name[name]


@pytest.mark.parametrize("verb", ["store", "load"])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        *product(["in place", "staged", "staged at once"], [_slots, _heads, _rows]),
        *product(["batched"], [_slots, _rows]),  # whose pages lie together
    ],
)
@settings(max_examples=40)
@given(data=st.data(), random=st.randoms(use_true_random=False))
def test_every_byte_gets_to_its_place_and_no_other_is_touched(
    verb: str, name: str, make: Callable[[], PagedKV], data: st.DataObject, random: Random
) -> None:
    batch = data.draw(batches(make, whole=verb == "store"))
    expected = _moved_one_by_one(batch, verb)
    device = ToyDevice(random.randrange, can_batch=True)
    stream = device.stream(urgent=True)
    row = row_bytes(batch.kv, batch.pages_per_chunk, batch.planes)
    lane = Lane(stream, stream.empty(row * len(batch.copies)))
    getattr(_mover(name, device), verb)(lane, batch)
    device.drain()
    for actual, wanted in zip(_contents(batch), expected, strict=True):
        assert np.array_equal(actual, wanted)


def test_rows_of_a_buffer_start_where_kernels_move_their_widest_words() -> None:
    stream = ToyDevice(lambda _: 0).stream(urgent=False)
    rows = Lane(stream, stream.empty(3 * 512)).rows(3, 300)
    assert rows.shape == (3, 300)
    assert rows.stride() == (512, 1)


PAGE = movers.BATCHED_FROM_BYTES


def test_large_pages_go_over_the_link_by_themselves() -> None:
    device = ToyDevice(lambda _: 0, can_batch=True)
    large, small = (torch.empty(2, size, dtype=torch.uint8) for size in (PAGE, PAGE - 1))
    assert isinstance(mover_for(device, PagedKV.of_rows([large]), pinned=True), Batched)
    assert isinstance(mover_for(device, PagedKV.of_rows([large, small]), pinned=True), Staged)


@pytest.mark.parametrize(("pinned", "num_calls"), [(True, 1), (False, 0)])
def test_pinned_slots_go_over_the_link_in_one_call_and_others_one_by_one(
    pinned: bool, num_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = ToyDevice(lambda _: 0, can_batch=True)
    calls, copy_spans = list[int](), device.copy_spans

    def counted(spans: Spans) -> None:
        calls.append(len(spans.sizes_bytes))
        copy_spans(spans)

    monkeypatch.setattr(device, "copy_spans", counted)
    kv = _slots()
    slots = [torch.zeros(part_bytes(kv, 2, range(4)), dtype=torch.uint8) for _ in range(3)]
    batch = Batch([ChunkCopy(kv, np.array([1, 4]), slot, 2) for slot in slots], range(4))
    stream = device.stream(urgent=False)
    mover_for(device, kv, pinned=pinned).store(Lane(stream, stream.empty(3 * 256)), batch)
    device.drain()
    assert calls == [3] * num_calls


def test_large_pages_are_staged_where_batched_copies_cannot_be() -> None:
    kv = PagedKV.of_rows([torch.empty(2, PAGE, dtype=torch.uint8)])
    device = ToyDevice(lambda _: 0, can_batch=False)
    assert isinstance(mover_for(device, kv, pinned=True), Staged)
    device.can_batch = True
    assert isinstance(mover_for(device, kv, pinned=False), Staged)


def test_pages_whose_bytes_lie_apart_are_staged() -> None:
    kv = PagedKV.of_heads([[torch.empty(1, 2, 2, PAGE, dtype=torch.uint8)]])
    assert isinstance(mover_for(ToyDevice(lambda _: 0, can_batch=True), kv, pinned=True), Staged)


def test_kernels_that_reach_slots_need_no_link() -> None:
    kv = PagedKV.of_rows([torch.empty(2, PAGE, dtype=torch.uint8)])
    assert isinstance(mover_for(CpuDevice(), kv, pinned=False), InPlace)


@pytest.mark.parametrize("name", ["in place", "batched"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pages": np.array([0, PAGES])}, r"pages are 0 to 7, must be from 0 to 6"),
        ({"pages": np.array([-1, 3])}, r"pages are -1 to 3, must be from 0 to 6"),
        ({"first": 1}, r"2 pages from 1 on, must be in 2"),
        ({"first": -1}, r"2 pages from -1 on, must be in 2"),
        ({"slot": torch.zeros(47, dtype=torch.uint8)}, r"a slot of 47 bytes, must be at least 48"),
    ],
)
def test_copies_that_would_write_elsewhere_are_refused_at_launch(
    change: dict[str, Any], message: str, name: str
) -> None:
    device = ToyDevice(lambda _: 0, can_batch=True)
    stream = device.stream(urgent=True)
    copy = ChunkCopy(_rows(), np.array([0, 1]), torch.zeros(48, dtype=torch.uint8), 2)
    batch = Batch([replace(copy, **change)], range(3))
    with pytest.raises(ValueError, match=message):
        _mover(name, device).load(Lane(stream, stream.empty(0)), batch)
    assert not stream.queue
