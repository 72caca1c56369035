"""csrc/copy.cu on the CPU, byte for byte against the twin, by the same plan as on a GPU."""

import itertools
import mmap
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from rootcellar.kernels import PagedKV
from rootcellar.kernels.compile import source_text
from rootcellar.kernels.launch import plan
from rootcellar.kernels.page_copy import checked

from .emulation import Emulated, compiled, emulated
from .paged_cases import Case, Way, cases, packed_case, permuted

WAYS: list[Way] = ["gather", "scatter"]


def run_emulated(
    case: Case, way: Way, *, block: int = 64, most_blocks: int = 2, kernels: Emulated | None = None
) -> None:
    copy = checked(case.kv, case.pages, case.chunks, case.pages_per_chunk, case.places, case.planes)
    if not len(copy.pages):
        return
    launch = plan(copy, most_blocks=most_blocks, block=block)
    arguments = launch.arguments(launch.words.ctypes.data)
    (kernels or emulated("copy.cu")).launch(way, launch.grid, launch.block, *arguments)


def results(
    case: Case, way: Way, *, block: int = 64, most_blocks: int = 2
) -> tuple[list[bytes], list[bytes]]:
    """All memory after the kernel, and after the twin."""
    case.fill()
    run_emulated(case, way, block=block, most_blocks=most_blocks)
    found = case.contents()
    case.fill()
    case.run(way)
    return found, case.contents()


@pytest.mark.parametrize("way", WAYS)
@given(data=st.data(), block=st.sampled_from([1, 32, 128]), most_blocks=st.integers(1, 3))
@settings(max_examples=150)
def test_the_kernel_writes_what_its_twin_writes_and_nothing_else(
    way: Way, data: st.DataObject, block: int, most_blocks: int
) -> None:
    found, expected = results(data.draw(cases(way)), way, block=block, most_blocks=most_blocks)
    assert found == expected


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tokens", [1, 2, 7, 16, 64, 256])
def test_pages_may_have_any_number_of_tokens(way: Way, tokens: int) -> None:
    case = packed_case(tokens=tokens, heads=3, head_bytes=34, pages_per_chunk=3, num_chunks=2)
    found, expected = results(permuted(case), way)
    assert found == expected


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [32 << 10, (32 << 10) + 1, 100_003])
def test_a_page_too_large_for_one_group_of_threads_is_shared_by_several(
    way: Way, size: int
) -> None:
    case = packed_case(num_pages=3, head_bytes=size, pages_per_chunk=3)
    found, expected = results(case, way, block=256, most_blocks=3)
    assert found == expected


@pytest.mark.parametrize("way", WAYS)
def test_large_and_small_pages_go_in_one_launch(way: Way) -> None:
    large = packed_case(num_pages=2, head_bytes=70_001, pages_per_chunk=1)
    small = packed_case(num_pages=2, head_bytes=5, pages_per_chunk=1)
    kv = type(large.kv)((*large.kv.planes, *small.kv.planes))
    whole = packed_case(num_planes=1, num_pages=1, head_bytes=kv.chunk_bytes(2), pages_per_chunk=1)
    memories = (large.memories[0], small.memories[0], whole.memories[1])
    case = Case(kv, whole.chunks, large.pages[:1] + 1, large.places[:1] + 1, 2, None, memories)
    found, expected = results(case, way, block=128)
    assert found == expected


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("misalign", [0, 1, 2, 3, 4, 8, 12, 15])
def test_memory_may_begin_anywhere(way: Way, misalign: int) -> None:
    case = packed_case(head_bytes=777, pages_per_chunk=4, num_chunks=2, misalign=misalign)
    found, expected = results(case, way)
    assert found == expected


@pytest.mark.parametrize("way", WAYS)
def test_the_size_of_a_block_makes_no_difference(way: Way) -> None:
    case = permuted(packed_case(tokens=4, head_bytes=1000, pages_per_chunk=3, num_chunks=2))
    found = [results(case, way, block=block)[0] for block in (1, 2, 32, 256, 1024)]
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("most_blocks", [1, 3, 1000])
def test_no_more_blocks_are_launched_than_asked_for_or_needed(most_blocks: int) -> None:
    case = packed_case(head_bytes=2048, pages_per_chunk=8)
    copy = checked(case.kv, case.pages, case.chunks, 8, None, None)
    launch = plan(copy, most_blocks=most_blocks, block=64)
    assert launch.grid == min(most_blocks, 2 * 8 * 32 // 64)


@pytest.mark.parametrize("way", WAYS)
def test_addresses_may_be_more_than_four_gigabytes_apart(way: Way) -> None:
    far = 5 << 30
    with mmap.mmap(-1, far + 4096) as mapping:  # of which three pages are ever touched
        memory = torch.frombuffer(mapping, dtype=torch.uint8)
        chunks = memory.as_strided((2, 30), (far, 1))
        pages = memory[64:].as_strided((2, 1, 1, 10), (far, 10, 10, 1))
        kv = PagedKV((pages,))
        case = Case(kv, chunks, np.array([1, 0]), np.array([2, 4]), 3, None, ())
        pages.copy_(torch.arange(20, dtype=torch.uint8).view(2, 1, 1, 10))
        chunks.copy_(torch.arange(60, dtype=torch.uint8).view(2, 30))
        run_emulated(case, way)
        found = pages.clone(), chunks.clone()
        expected = torch.arange(60, dtype=torch.uint8)
        if way == "gather":
            expected[20:30], expected[40:50] = torch.arange(10, 20), torch.arange(10)
        del memory, chunks, pages, kv, case
    assert torch.equal(found[1].view(-1), expected)
    if way == "scatter":
        assert found[0].view(-1).tolist() == [*range(40, 50), *range(20, 30)]


def test_short_and_long_numbers_are_divided_alike(tmp_path: Path) -> None:
    source = tmp_path / "divide.cu"
    source.write_text(
        '#include "common.cuh"\n'
        'extern "C" __global__ void divide(u64* to, u64 a, u64 b) { *to = divided(a, b); }\n'
    )
    kernels, found = compiled(source), np.zeros(1, np.uint64)
    numbers = [1, 7, (1 << 32) - 1, 1 << 32, (1 << 32) + 5, (1 << 63) + 9]
    for a, b in itertools.product(numbers, numbers):
        kernels.launch("divide", 1, 1, found.ctypes.data, a, b)
        assert int(found[0]) == a // b


FAULTS = [
    ("i < bytes; i += lanes", "i <= bytes; i += lanes"),
    ("sizeof(Word) + lane; i < bytes", "sizeof(Word) + lane; i + 1 < bytes"),
    ("for (; i < words; i += lanes)", "for (; i <= words; i += lanes)"),
    ("d = source[i + 3 * lanes]", "d = source[i + 2 * lanes]"),
    ("i + 3 * lanes < words", "i + 2 * lanes < words"),
    ("page * plane.page_stride", "page * plane.page_bytes"),
    ("row * plane.row_stride", "row * plane.piece_stride"),
    ("chunk * chunk_stride", "chunk * plane.page_bytes"),
    ("place * plane.page_bytes", "place / 2 * plane.page_bytes"),
    ("plane.offset * pages_per_chunk", "plane.offset"),
    ("stop = plane.num_pieces;", "stop = plane.num_pieces - 1;"),
    ("if (bytes > plane.piece_bytes) bytes = plane.piece_bytes;", ""),
]


@pytest.mark.parametrize(("right", "wrong"), FAULTS)
def test_a_kernel_with_a_fault_is_found_out(right: str, wrong: str, tmp_path: Path) -> None:
    text = source_text("copy.cu")
    assert right in text
    source = tmp_path / "copy.cu"
    source.write_text(text.replace(right, wrong))
    kernels = compiled(source)
    assert not all(_is_right(case, kernels) for case in _telling_cases())


def _telling_cases() -> list[Case]:
    """Between them they reach every line of the kernel, last bytes of the memory included."""
    shapes = [(8, 777, 3, 0), (8, 2048, 3, 8), (3, 70_001, 2, 1), (8, 1344, 8, 0)]
    packed = [
        packed_case(
            num_pages=pages, head_bytes=size, pages_per_chunk=each, num_chunks=2, misalign=misalign
        )
        for pages, size, each, misalign in shapes
    ]
    heads = packed_case(num_pages=4, tokens=6, heads=2, head_bytes=96, pages_per_chunk=4)
    turned = type(heads.kv)(
        tuple(
            plane.as_strided((2, 6, 2, 96), (2304, 96, 1152, 1), plane.storage_offset())
            for plane in heads.kv.planes
        )
    )
    return [
        *packed,
        *map(permuted, packed),
        Case(turned, heads.chunks, heads.pages[:2], heads.places[1:3], 4, None, heads.memories),
    ]


def _is_right(case: Case, kernels: Emulated) -> bool:
    for way in WAYS:
        case.fill()
        run_emulated(case, way, kernels=kernels)
        try:
            found = case.contents()
        except AssertionError:
            return False
        case.fill()
        case.run(way)
        if found != case.contents():
            return False
    return True


def test_the_cases_that_find_faults_find_none_in_the_kernel() -> None:
    assert all(_is_right(case, emulated("copy.cu")) for case in _telling_cases())
