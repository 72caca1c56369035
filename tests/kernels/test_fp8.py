from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rootcellar.kernels import gather
from rootcellar.kernels.fp8 import fp8_chunk_bytes, gather_fp8, scatter_fp8
from rootcellar.kernels.paged import PagedKV

from .fp8_cases import CONTENTS, DTYPES, Content, Fp8Case, Way, fp8_cases, packed_fp8_case

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
WAYS: list[Way] = ["gather", "scatter"]


def elements(plane: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy of a plane as (num_pages, tokens, heads, head_dim) floats."""
    return plane.contiguous().view(dtype).float()


def quantised_by_torch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) of (pages, tokens, heads, head_dim), with torch's own fp8."""
    magnitudes = torch.where(x.isfinite(), x.abs(), 0)
    largest = magnitudes.amax((0, 1, 3), keepdim=True)
    scales = torch.where(largest == 0, 1, (largest / 448).clamp(min=2.0**-126))
    scaled = (x.abs() / scales).clamp(max=448).copysign(x)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scales.flatten()


def dequantised_by_torch(
    codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    values = codes.view(torch.float8_e4m3fn).float() * scales[:, None]
    limit = torch.finfo(dtype)
    return values.clamp(limit.min, limit.max).to(dtype)


def parts(case: Fp8Case, row: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(codes, scales) of each plane of a chunk, as fp8.py's picture says."""
    chunk, at, found = case.chunks[row], 0, []
    shapes = [(*p.shape[1:3], p.shape[3] // case.dtype.itemsize) for p in case.kv.planes]
    for shape in shapes:
        size = case.pages_per_chunk * int(np.prod(shape))
        found.append(chunk[at : at + size].view(case.pages_per_chunk, *shape))
        at += size
    at = -(-at // 16) * 16
    scales = []
    for _, heads, _ in shapes:
        scales.append(chunk[at : at + 4 * heads].view(torch.float32))
        at += 4 * heads
    assert at == case.chunks.shape[1] == fp8_chunk_bytes(case.kv, case.pages_per_chunk)
    return list(zip(found, scales, strict=True))


@given(case=fp8_cases("gather"), content=st.sampled_from(CONTENTS))
@settings(max_examples=150)
def test_gather_writes_what_torchs_fp8_gives(case: Fp8Case, content: Content) -> None:
    case.fill(content)
    before = case.contents()
    case.run("gather")
    assert case.contents()[:-1] == before[:-1], "pages were written"
    rows = case.places // case.pages_per_chunk
    for row in np.unique(rows).tolist():
        order = np.argsort(np.where(rows == row, case.places, 1 << 40))[: case.pages_per_chunk]
        for plane, (codes, scales) in zip(case.kv.planes, parts(case, row), strict=True):
            x = elements(plane[case.pages[order]], case.dtype)
            expected, expected_scales = quantised_by_torch(x)
            is_nan = x.isnan()
            assert torch.equal(codes & 0x7F == 0x7F, is_nan)
            # The sign of a NaN is lost in some of torch's conversions.
            assert torch.equal(codes[~is_nan], expected[~is_nan])
            assert torch.equal(scales, expected_scales)


@given(case=fp8_cases("scatter"))
@settings(max_examples=150)
def test_scatter_writes_what_torchs_fp8_gives_to_its_pages_and_no_others(case: Fp8Case) -> None:
    case.fill()
    untouched = set(range(case.kv.num_pages)) - set(case.pages.tolist())
    before = [plane.clone() for plane in case.kv.planes]
    case.run("scatter")
    case.contents()
    for page, place in zip(case.pages.tolist(), case.places.tolist(), strict=True):
        row, at = divmod(place, case.pages_per_chunk)
        for plane, (codes, scales) in zip(case.kv.planes, parts(case, row), strict=True):
            expected = dequantised_by_torch(codes[at], scales, case.dtype)
            found = plane[page].contiguous().view(case.dtype)
            assert torch.equal(found.isnan(), expected.isnan())
            assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    for plane, old in zip(case.kv.planes, before, strict=True):
        assert all(torch.equal(plane[page], old[page]) for page in untouched)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_was_gathered_is_scattered_back_within_the_error(
    device: str, dtype: torch.dtype
) -> None:
    kv_pages = torch.randn((2, 2, 40, 3, 24), generator=torch.Generator().manual_seed(0))
    pages = kv_pages.to(device, dtype)
    kv = PagedKV.of_slots(pages)
    chunks = torch.empty(
        (2, fp8_chunk_bytes(kv, 16) // 16 * 16 + 16), dtype=torch.uint8, device=device
    )
    numbers = np.random.default_rng(0).permutation(40)[:32]
    gather_fp8(kv, numbers, chunks, pages_per_chunk=16)
    back = torch.full_like(pages, 7)
    scatter_fp8(chunks, PagedKV.of_slots(back), numbers, pages_per_chunk=16)
    error = (back - pages).abs().float()[:, :, numbers]
    x = pages.abs().float()[:, :, numbers]
    assert (error <= torch.maximum(x / 15, x.amax() / 448 / 1000)).all()
    others = sorted(set(range(40)) - set(numbers.tolist()))
    assert (back[:, :, others] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantising_again_what_came_back_changes_nothing(dtype: torch.dtype) -> None:
    case = packed_fp8_case(dtype=dtype, tokens=4, heads=3, head_dim=16, pages_per_chunk=5)
    case.fill("ties")
    case.run("gather")
    first = case.chunk_memory.array.tobytes()
    case.run("scatter")
    case.run("gather")
    assert case.chunk_memory.array.tobytes() == first


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chunk_takes_a_byte_an_element_and_four_a_scale(dtype: torch.dtype) -> None:
    case = packed_fp8_case(
        dtype=dtype, num_planes=3, tokens=2, heads=5, head_dim=7, pages_per_chunk=3
    )
    payload = 3 * 3 * 2 * 5 * 7
    assert fp8_chunk_bytes(case.kv, 3) == -(-payload // 16) * 16 + 3 * 5 * 4


def test_equal_pages_make_equal_chunks_whatever_was_there_before() -> None:
    case = packed_fp8_case(dtype=torch.float16, heads=1, head_dim=3, pages_per_chunk=3)
    found = set()
    for junk in (0, 0x5A, 0xFF):
        case.fill("ordinary")
        case.chunk_memory.array[:] = junk
        case.run("gather")
        found.add(case.chunk_memory.array.tobytes())
    assert len(found) == 1


def test_pages_and_chunks_of_another_dtype_saturate_and_are_never_infinite() -> None:
    large = packed_fp8_case(dtype=torch.bfloat16, head_dim=16, pages_per_chunk=2)
    large.memories[0].array[:] = torch.full((128,), -1e30, dtype=torch.bfloat16).view(torch.uint8)
    large.run("gather")
    small = replace(
        packed_fp8_case(dtype=torch.float16, head_dim=16, pages_per_chunk=2), chunks=large.chunks
    )
    small.run("scatter")
    assert (elements(small.kv.planes[0], torch.float16) == -65504).all()


def test_places_are_the_first_ones_unless_given() -> None:
    case = packed_fp8_case(dtype=torch.bfloat16, head_dim=16, pages_per_chunk=2, num_chunks=2)
    case.fill("ordinary")
    case.run("gather")
    expected = case.chunk_memory.array.tobytes()
    case.fill("ordinary")
    gather_fp8(case.kv, case.pages, case.chunks, pages_per_chunk=2)
    assert case.chunk_memory.array.tobytes() == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("way", WAYS)
@given(data=st.data(), content=st.sampled_from(CONTENTS))
@settings(max_examples=50)
def test_a_gpu_copies_what_the_cpu_copies(way: Way, data: st.DataObject, content: Content) -> None:
    case = data.draw(fp8_cases(way))
    case.fill(content)
    planes = tuple(_on_gpu(plane) for plane in case.kv.planes)
    kv, chunks = PagedKV(planes, dtype=case.dtype), _on_gpu(case.chunks)
    replace(case, kv=kv, chunks=chunks).run(way)
    case.run(way)
    assert torch.equal(chunks.cpu(), case.chunks)
    for found, expected in zip(planes, case.kv.planes, strict=True):
        assert torch.equal(found.cpu(), expected)


def _on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """The same strides, in memory of its own."""
    size = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    memory = torch.zeros(size, dtype=torch.uint8, device="cuda")
    strided = memory.as_strided(tensor.shape, tensor.stride())
    strided.copy_(tensor)
    return strided


@pytest.mark.parametrize("way", WAYS)
def test_no_pages_are_no_copy(way: Way) -> None:
    case = packed_fp8_case(dtype=torch.bfloat16, head_dim=16, pages_per_chunk=2)
    case.fill()
    before = case.contents()
    replace(case, pages=case.pages[:0], places=case.places[:0]).run(way)
    assert case.contents() == before


def test_elements_are_packed_as_gather_packs_bytes() -> None:
    case = packed_fp8_case(dtype=torch.float32, tokens=3, heads=2, head_dim=5, pages_per_chunk=4)
    case.fill("ties")
    case.run("gather")
    raw = torch.empty((1, case.kv.chunk_bytes(4)), dtype=torch.uint8)
    gather(case.kv, case.pages, raw, pages_per_chunk=4, places=case.places)
    signs = case.chunks[0, : raw.shape[1] // 4] >= 0x80
    assert torch.equal(signs, raw[0].view(torch.float32).signbit())


PARTIAL: list[tuple[list[int], str]] = [
    ([0, 2, 5, 4], r"chunks\[0\] is given pages \[0, 2\], must be each of 3 once"),
    ([3, 4], r"chunks\[1\] is given pages \[0, 1\]"),
    ([0, 1, 1], r"chunks\[0\] is given pages \[0, 1, 1\]"),
    ([0, 1, 2, 2], r"chunks\[0\] is given pages \[0, 1, 2, 2\]"),
]


@pytest.mark.parametrize(("places", "message"), PARTIAL)
def test_gather_refuses_a_chunk_that_is_not_whole(places: list[int], message: str) -> None:
    case = packed_fp8_case(dtype=torch.bfloat16, head_dim=8, pages_per_chunk=3, num_chunks=2)
    case.fill()
    before = case.contents()
    with pytest.raises(ValueError, match=message):
        replace(case, pages=case.pages[: len(places)], places=np.array(places)).run("gather")
    assert case.contents() == before


PACKED = packed_fp8_case(dtype=torch.bfloat16, head_dim=8, pages_per_chunk=2, num_chunks=2)
PLANE = PACKED.kv.planes[0]
ROWS = torch.zeros((2, 128), dtype=torch.uint8)

BAD: list[tuple[dict[str, Any], str]] = [
    ({"pages": np.array([0, 4])}, r"pages\[1\] is 4, must be from 0 to 3"),
    ({"places": np.array([0, 4])}, r"places\[1\] is 4, must be from 0 to 3"),
    ({"places": np.array([-1, 0])}, r"places\[0\] is -1"),
    ({"places": np.array([0])}, "1 places, must be one for each of 2 pages"),
    ({"pages_per_chunk": 0}, "pages_per_chunk is 0, must be at least 1"),
    ({"chunks": ROWS[:, :79]}, "79.*must have at least 80 bytes a row"),
    ({"chunks": ROWS[:, :63]}, "63 bytes a row, must be at least 64"),
    ({"chunks": ROWS.view(torch.int8)}, "must be uint8"),
    ({"chunks": ROWS[:, 8:]}, "rows must lie at multiples of 16 bytes"),
    ({"chunks": torch.zeros((2, 89), dtype=torch.uint8)}, "rows must lie at multiples of 16 bytes"),
    ({"chunks": ROWS.as_strided((2, 80), (64, 1))}, "must have at least 80 bytes a row"),
    ({"kv": PagedKV((PLANE,))}, "kv.dtype is None, must be one of torch.bfloat16"),
    ({"kv": PagedKV((PLANE,), dtype=torch.int8)}, "kv.dtype is torch.int8"),
    ({"kv": PagedKV((PLANE[..., :3],), dtype=torch.bfloat16)}, r"planes\[0\].* of their 2 bytes"),
    ({"kv": PagedKV((PLANE[..., 1:9],), dtype=torch.bfloat16)}, r"planes\[0\].* of their 2 bytes"),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("change", "message"), BAD)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    way: Way, change: dict[str, Any], message: str
) -> None:
    case = replace(PACKED, pages=PACKED.pages[:2], places=PACKED.places[:2])
    case.fill()
    before = case.contents()
    with pytest.raises(ValueError, match=message):
        replace(case, **change).run(way)
    assert case.contents() == before
