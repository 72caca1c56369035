import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from rootcellar.kernels import PagedKV, gather, scatter

from .paged_cases import Case, Way, cases, packed_case

ROOT = Path(__file__).parents[2]
DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
WAYS: list[Way] = ["gather", "scatter"]


def results(case: Case, way: Way, *, default_places: bool = False) -> tuple[Any, Any]:
    """All memory after the copy, and after a naive one."""
    case.fill()
    case.run(way, default_places=default_places)
    found = case.contents()
    case.fill()
    case.run_naively(way)
    return found, case.contents()


@pytest.mark.parametrize("way", WAYS)
@given(data=st.data())
@settings(max_examples=300)
def test_planes_of_any_strides_are_copied_page_by_page(way: Way, data: st.DataObject) -> None:
    found, expected = results(data.draw(cases(way)), way)
    assert found == expected


@pytest.mark.parametrize("way", WAYS)
@given(data=st.data(), unit=st.sampled_from([1, 2, 16]), step=st.sampled_from([1, 2]))
@settings(max_examples=100)
def test_slots_allocated_by_the_page_are_copied_in_runs(
    way: Way, data: st.DataObject, unit: int, step: int
) -> None:
    whole = packed_case(num_planes=2 * step, num_pages=150, head_bytes=3, pages_per_chunk=70)
    kv = PagedKV(whole.kv.planes[::step])
    order = data.draw(st.permutations(range(150 // unit)) | st.just(range(150 // unit)))
    slots = (np.array(order)[:, None] * unit + np.arange(unit)).reshape(-1)[:70]
    case = replace(whole, kv=kv, pages=slots, places=np.arange(len(slots)))
    found, expected = results(case, way, default_places=True)
    assert found == expected


@pytest.mark.parametrize("way", WAYS)
@given(data=st.data(), unit=st.sampled_from([1, 2, 16]))
@settings(max_examples=100)
def test_a_chunk_may_be_met_in_the_middle(way: Way, data: st.DataObject, unit: int) -> None:
    per_chunk = 16 * data.draw(st.integers(2, 4))
    whole = packed_case(num_pages=150, head_bytes=3, pages_per_chunk=per_chunk, num_chunks=2)
    order = data.draw(st.permutations(range(150 // unit)) | st.just(range(150 // unit)))
    slots = (np.array(order)[:, None] * unit + np.arange(unit)).reshape(-1)
    first = unit * data.draw(st.integers(0, per_chunk // unit - 1))
    count = data.draw(st.integers(1, min(len(slots), 2 * per_chunk - first)))
    case = replace(whole, pages=slots[:count], places=np.arange(first, first + count))
    found, expected = results(case, way)
    assert found == expected


@pytest.mark.parametrize("way", WAYS)
@given(data=st.data(), sizes=st.lists(st.sampled_from([4, 4, 6]), min_size=1, max_size=6))
@settings(max_examples=100)
def test_every_layer_may_have_memory_of_its_own(
    way: Way, data: st.DataObject, sizes: list[int]
) -> None:
    alone = [packed_case(num_planes=1, num_pages=8, head_bytes=n, pages_per_chunk=1) for n in sizes]
    kv = PagedKV(tuple(plane for case in alone for plane in case.kv.planes))
    packed = packed_case(num_pages=1, head_bytes=kv.chunk_bytes(5), pages_per_chunk=1)
    pages = data.draw(st.permutations(range(8)).map(lambda order: order[:5]) | st.just(range(5)))
    memories = (*(case.memories[0] for case in alone), packed.memories[1])
    case = Case(
        kv, packed.chunks[:, : kv.chunk_bytes(5)], np.array(pages), np.arange(5), 5, None, memories
    )
    found, expected = results(case, way)
    assert found == expected


@pytest.mark.parametrize("way", WAYS)
def test_one_kv_serves_chunks_of_any_size_and_pages_in_any_units(way: Way) -> None:
    whole = packed_case(num_pages=64, head_bytes=5, pages_per_chunk=48)
    for per_chunk in (48, 32, 7):
        for unit in (1, 2, 16, 1):
            numbers = np.arange(64).reshape(-1, unit)[::-1].reshape(-1)[:per_chunk]
            chunks = whole.chunks[:, : whole.kv.chunk_bytes(per_chunk)]
            places = np.arange(per_chunk)
            case = replace(
                whole, chunks=chunks, pages=numbers, places=places, pages_per_chunk=per_chunk
            )
            found, expected = results(case, way)
            assert found == expected


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("pages", "first", "per_chunk"),
    [
        ([2, 3, 6, 7, 0, 1], 0, 8),
        ([2, 3, 6, 7, 0, 1], 1, 8),
        ([2, 3, 6, 7, 0, 1], 0, 7),
        ([1, 2, 5, 6], 0, 8),
        ([0, 1, 4, 6, 8, 9], 0, 8),
        ([0, 1, 4, 5, 8], 0, 8),
    ],
)
def test_pages_are_taken_in_pairs_only_where_both_ends_have_them_so(
    way: Way, pages: list[int], first: int, per_chunk: int
) -> None:
    case = packed_case(num_pages=11, head_bytes=3, pages_per_chunk=per_chunk)
    places = np.arange(first, first + len(pages))
    found, expected = results(replace(case, pages=np.array(pages), places=places), way)
    assert found == expected


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pages", [[4, 0, 7, 2, 5], [2, 3, 4], [0, 2, 4, 6], [6], [6, 7, 2, 3]])
def test_keys_and_values_may_take_turns_page_by_page(way: Way, pages: list[int]) -> None:
    whole = packed_case(num_planes=1, num_pages=16, tokens=3, head_bytes=8, pages_per_chunk=3)
    (both,) = whole.kv.planes
    kv = PagedKV((both[::2], both[1::2]))
    places = np.arange(len(pages))
    packed = packed_case(num_pages=1, head_bytes=kv.chunk_bytes(6), pages_per_chunk=1)
    memories = (whole.memories[0], packed.memories[1])
    case = Case(kv, packed.chunks, np.array(pages), places, 6, None, memories)
    found, expected = results(case, way)
    assert found == expected


@pytest.mark.parametrize("way", WAYS)
def test_places_are_all_of_the_first_chunks_unless_given(way: Way) -> None:
    case = packed_case(num_pages=7, head_bytes=5, pages_per_chunk=3, num_chunks=3)
    found, expected = results(case, way, default_places=True)
    assert found == expected


@pytest.mark.parametrize("way", WAYS)
def test_no_pages_copy_nothing(way: Way) -> None:
    case = packed_case(head_bytes=5, pages_per_chunk=3)
    case = replace(case, pages=case.pages[:0], places=case.places[:0])
    found, expected = results(case, way)
    assert found == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_gather_gives_back_what_scatter_was_given(device: str, dtype: torch.dtype) -> None:
    pages = torch.zeros((3, 2, 600, 2, 8), dtype=dtype, device=device)
    kv = PagedKV.of_slots(pages)
    size_bytes = kv.chunk_bytes(256)
    chunks = torch.randint(0, 256, (2, size_bytes), dtype=torch.uint8).to(device)
    slots = np.random.default_rng(0).permutation(600)[:512]
    scatter(chunks, kv, slots, pages_per_chunk=256)
    out = torch.zeros_like(chunks)
    gather(kv, slots, out, pages_per_chunk=256)
    assert torch.equal(out, chunks)
    chunk = chunks[0].view(dtype).view(3, 2, 256, 2, 8)
    of_first = torch.from_numpy(slots[:256]).to(device)
    assert torch.equal(pages.view(torch.uint8)[:, :, of_first], chunk.view(torch.uint8))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("way", WAYS)
@given(data=st.data())
@settings(max_examples=50)
def test_a_gpu_copies_what_the_cpu_copies(way: Way, data: st.DataObject) -> None:
    case = data.draw(cases(way))
    case.fill()
    planes = tuple(_on_gpu(plane) for plane in case.kv.planes)
    remote = replace(case, kv=PagedKV(planes), chunks=_on_gpu(case.chunks))
    remote.run(way)
    case.run(way)
    assert torch.equal(remote.chunks.cpu(), case.chunks)
    for found, expected in zip(planes, case.kv.planes, strict=True):
        assert torch.equal(found.cpu(), expected)


def _on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """The same strides, in memory of its own."""
    size = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    memory = torch.zeros(size, dtype=torch.uint8, device="cuda")
    strided = memory.as_strided(tensor.shape, tensor.stride())
    strided.copy_(tensor)
    return strided


def test_indices_may_be_read_only_and_of_any_integer_type() -> None:
    case = packed_case(head_bytes=5, pages_per_chunk=4)
    expected = results(case, "gather")[1]
    for dtype in (np.uint8, np.int32, np.uint64):
        case.fill()
        numbers = np.arange(4, dtype=dtype)
        numbers.flags.writeable = False
        gather(case.kv, numbers, case.chunks, pages_per_chunk=4, places=numbers)
        assert case.contents() == expected
    case.fill()
    gather(case.kv, [0, 1, 2, 3], case.chunks, pages_per_chunk=4, places=range(4))
    assert case.contents() == expected


GOOD: dict[str, Any] = {"pages": [0, 7], "pages_per_chunk": 2, "places": [3, 0], "planes": None}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"pages": [0, 8]}, r"pages\[1\] is 8, must be from 0 to 7"),
    ({"pages": [-1, 0]}, r"pages\[0\] is -1, must be from 0 to 7"),
    ({"pages": [0.0, 1.0]}, "pages are float64"),
    ({"pages": [[0], [1]]}, "pages are int64"),
    ({"pages": [True, False]}, "pages are bool"),
    ({"places": [0, 4]}, r"places\[1\] is 4, must be from 0 to 3"),
    ({"places": [0, -2]}, r"places\[1\] is -2, must be from 0 to 3"),
    ({"places": [0]}, "1 places, must be one for each of 2 pages"),
    ({"pages": [0] * 5, "places": None}, "5 pages, must be at most the 4 of chunks"),
    ({"pages_per_chunk": 0}, "pages_per_chunk is 0, must be an int of at least 1"),
    ({"pages_per_chunk": 4.0}, r"pages_per_chunk is 4\.0, must be an int"),
    ({"pages_per_chunk": 3}, "chunks has 20 bytes a row, must be at least 30"),
    ({"chunks": torch.zeros((2, 19), dtype=torch.uint8)}, "chunks has 19 bytes a row"),
    ({"planes": range(1, 3)}, r"planes is range\(1, 3\), must be some of range\(0, 2\)"),
    ({"planes": range(-1, 1)}, r"planes is range\(-1, 1\)"),
    ({"planes": range(0, 2, 2)}, r"planes is range\(0, 2, 2\)"),
    ({"planes": range(1, 1)}, r"planes is range\(1, 1\)"),
    ({"chunks": torch.zeros(2, 20)}, r"chunks is torch.float32 \(2, 20\), must be uint8"),
    ({"chunks": torch.zeros(20, dtype=torch.uint8)}, r"chunks is torch.uint8 \(20,\), must be"),
    ({"chunks": torch.zeros((20, 2), dtype=torch.uint8).t()}, r"chunks has strides \(1, 2\)"),
    ({"chunks": torch.zeros(20, dtype=torch.uint8).expand(2, 20)}, r"chunks has strides \(0, 1\)"),
    ({"chunks": torch.zeros((2, 20), dtype=torch.uint8, device="meta")}, "chunks is on meta"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    change: dict[str, Any], message: str
) -> None:
    case = packed_case(head_bytes=5, pages_per_chunk=2, num_chunks=2)
    case.fill()
    before = case.contents()
    arguments: dict[str, Any] = {"chunks": case.chunks} | GOOD | change
    pages, chunks = arguments.pop("pages"), arguments.pop("chunks")
    with pytest.raises(ValueError, match=message):
        gather(case.kv, pages, chunks, **arguments)
    with pytest.raises(ValueError, match=message):
        scatter(chunks, case.kv, pages, **arguments)
    assert case.contents() == before


def test_a_device_without_kernels_is_refused() -> None:
    kv = PagedKV((torch.zeros((1, 1, 1, 4), dtype=torch.uint8, device="meta"),))
    chunks = torch.zeros((1, 4), dtype=torch.uint8, device="meta")
    with pytest.raises(ValueError, match="kv is on meta, must be on cpu or cuda"):
        gather(kv, [0], chunks, pages_per_chunk=1)


def test_transformers_does_not_take_this_folder_for_hugging_faces_kernels() -> None:
    pytest.importorskip("transformers")
    if find_spec("kernels"):
        pytest.skip("Hugging Face's kernels is installed")
    # With -c, the working directory comes first on the path, and with it our folder.
    check = "import transformers.utils as u, kernels; print(u.is_kernels_available())"
    unsafe = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    ran = subprocess.run(
        [sys.executable, "-c", check],
        cwd=ROOT,
        env=unsafe,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.strip() == "False"


def test_another_kind_of_thing_is_named() -> None:
    case = packed_case(head_bytes=5, pages_per_chunk=2, num_chunks=2)
    swapped: Any = (case.chunks, [0, 1], case.kv)
    with pytest.raises(TypeError, match="kv is a Tensor, must be a PagedKV"):
        gather(*swapped, pages_per_chunk=2)
    array: Any = case.chunks.numpy()
    with pytest.raises(TypeError, match="chunks is a ndarray, must be a Tensor"):
        scatter(array, case.kv, [0, 1], pages_per_chunk=2)
    planes: Any = (0, 1)
    with pytest.raises(TypeError, match=r"planes is \(0, 1\), must be a range"):
        gather(case.kv, [0, 1], case.chunks, pages_per_chunk=2, planes=planes)
