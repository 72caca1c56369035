"""How jobs are cut, whatever their copies."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from rootcellar.kernels.paged import PagedKV
from rootcellar.tiers import batches
from rootcellar.tiers.batches import in_batches
from rootcellar.tiers.movers import ChunkCopy, row_bytes

KVS = [
    PagedKV(tuple(torch.zeros(4, 1, 1, width, dtype=torch.uint8) for width in widths), num_layers)
    for num_layers, widths in ((3, [3, 5, 300, 8, 1, 1]), (2, [40, 40]), (1, [700]))
]
SLOT = torch.zeros(1, dtype=torch.uint8)


@st.composite
def copies(draw: st.DrawFn) -> list[ChunkCopy]:
    kinds = draw(st.lists(st.tuples(st.sampled_from(KVS), st.integers(1, 2)), max_size=8))
    return [ChunkCopy(kv, np.zeros(1, np.int64), SLOT, per_chunk) for kv, per_chunk in kinds]


@given(copies=copies(), staging_bytes=st.integers(1536, 4096), by_layer=st.booleans())
def test_every_plane_of_every_copy_is_in_one_batch_and_batches_fit(
    copies: list[ChunkCopy], staging_bytes: int, by_layer: bool
) -> None:
    found = list(in_batches(copies, staging_bytes, by_layer=by_layer))
    for batch in found:
        assert {(copy.kv, copy.pages_per_chunk) for copy in batch.copies} == {
            (batch.kv, batch.pages_per_chunk)
        }
        row = row_bytes(batch.kv, batch.pages_per_chunk, batch.planes)
        assert len(batch.copies) * row <= staging_bytes
    moved = [(id(copy), plane) for b in found for copy in b.copies for plane in b.planes]
    wanted = [(id(copy), plane) for copy in copies for plane in range(len(copy.kv.planes))]
    assert sorted(moved) == sorted(wanted)


@given(count=st.integers(1, 5), layer_bytes=st.integers(1, 700))
def test_layers_come_first_to_last_each_whole_and_none_too_small(
    count: int, layer_bytes: int
) -> None:
    kv = KVS[0]
    copies = [ChunkCopy(kv, np.zeros(1, np.int64), SLOT, 1) for _ in range(count)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "LAYER_BYTES", layer_bytes)
        found = list(in_batches(copies, 512, by_layer=True))
    parts = list(dict.fromkeys(batch.planes for batch in found))
    assert [batch.planes for batch in found] == sorted(
        (batch.planes for batch in found), key=lambda planes: planes.start
    )
    assert [plane for planes in parts for plane in planes] == list(range(6))
    for planes in parts:
        assert planes.start % 2 == planes.stop % 2 == 0
    for planes in parts[:-1]:
        assert kv.chunk_bytes(1, planes) >= layer_bytes


def test_a_chunk_that_no_buffer_has_room_for_is_refused() -> None:
    with pytest.raises(ValueError, match="a chunk takes 768 bytes, buffers have 767"):
        list(in_batches([ChunkCopy(KVS[2], np.zeros(1, np.int64), SLOT, 1)], 767))
