"""What is known of planes."""

import gc

import pytest
import torch

from rootcellar.kernels.paged import PagedKV
from rootcellar.tiers import planes
from rootcellar.tiers.planes import part_bytes, planes_of


def test_planes_are_described_by_where_they_lie() -> None:
    pool = torch.zeros(2, 10, 16, dtype=torch.uint8)
    kv = PagedKV.of_rows([pool[0, :, :12], pool[1, :, :8]])
    known = planes_of(kv)
    assert known.addresses.tolist() == [pool.data_ptr(), pool.data_ptr() + 160]
    assert known.pitches.tolist() == [16, 16]
    assert known.sizes.tolist() == [12, 8]
    assert known.starts.tolist() == [0, 12, 20]
    assert known.packed_page_bytes == 8
    assert planes_of(kv) is known


def test_pages_whose_bytes_lie_apart_are_not_packed() -> None:
    heads = torch.zeros(1, 2, 5, 4)
    assert planes_of(PagedKV.of_heads([[heads]])).packed_page_bytes == 0


@pytest.mark.parametrize(
    ("part", "size_bytes"), [(range(0), 0), (range(1), 12), (range(1, 2), 8), (range(2), 20)]
)
def test_a_part_of_a_chunk_is_as_large_as_its_planes(part: range, size_bytes: int) -> None:
    kv = PagedKV.of_rows([torch.zeros(3, size, dtype=torch.uint8) for size in (12, 8)])
    assert part_bytes(kv, 5, part) == 5 * size_bytes


def test_what_is_known_is_forgotten_with_the_kv() -> None:
    kv = PagedKV.of_rows([torch.zeros(2, 8)])
    planes_of(kv)
    before = len(planes._KNOWN)
    del kv
    gc.collect()
    assert len(planes._KNOWN) < before
