"""csrc/fp8.cu on the CPU, byte for byte against the twin, by the same plan as on a GPU."""

from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from rootcellar.kernels.compile import source_text
from rootcellar.kernels.cuda_fp8 import plan_gather, plan_scatter
from rootcellar.kernels.fp8_copy import checked, whole

from .emulation import Emulated, compiled, emulated
from .fp8_cases import CONTENTS, DTYPES, Content, Fp8Case, Way, fp8_cases, packed_fp8_case

WAYS: list[Way] = ["gather", "scatter"]


def run_emulated(
    case: Fp8Case, way: Way, *, most_threads: int = 64, kernels: Emulated | None = None
) -> None:
    copy = checked(case.kv, case.pages, case.chunks, case.pages_per_chunk, case.places)
    if not len(copy.pages):
        return
    if way == "gather":
        launch = plan_gather(whole(copy), most_threads=most_threads)
    else:
        launch = plan_scatter(copy, most_threads=most_threads)
    name = f"{way}_fp8_{str(case.dtype).removeprefix('torch.')}"
    arguments = launch.arguments(launch.words.ctypes.data)
    (kernels or emulated("fp8.cu")).launch(name, launch.grid, launch.block, *arguments)


def results(
    case: Fp8Case, way: Way, content: Content = "any bits", most_threads: int = 64
) -> tuple[list[bytes], list[bytes]]:
    """All memory after the kernel, and after the twin."""
    case.fill(content)
    run_emulated(case, way, most_threads=most_threads)
    found = case.contents()
    case.fill(content)
    case.run(way)
    return found, case.contents()


@pytest.mark.parametrize("way", WAYS)
@given(data=st.data(), content=st.sampled_from(CONTENTS), most=st.sampled_from([1, 32, 128]))
@settings(max_examples=150)
def test_the_kernel_writes_what_its_twin_writes_and_nothing_else(
    way: Way, data: st.DataObject, content: Content, most: int
) -> None:
    found, expected = results(data.draw(fp8_cases(way)), way, content, most)
    assert found == expected


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_elements_may_be_of_any_kind(way: Way, content: Content, dtype: torch.dtype) -> None:
    case = packed_fp8_case(dtype=dtype, tokens=3, heads=5, head_dim=24, pages_per_chunk=4)
    found, expected = results(case, way, content)
    assert found == expected


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tokens", [1, 2, 7, 16, 64, 256])
def test_pages_may_have_any_number_of_tokens(way: Way, tokens: int) -> None:
    case = packed_fp8_case(
        dtype=torch.bfloat16, tokens=tokens, head_dim=18, pages_per_chunk=3, num_chunks=2
    )
    found, expected = results(case, way, "ordinary", 128)
    assert found == expected


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("misalign", range(0, 32, 2))
def test_memory_may_begin_at_any_element(way: Way, misalign: int) -> None:
    case = packed_fp8_case(
        dtype=torch.float16, head_dim=40, pages_per_chunk=4, num_chunks=2, misalign=misalign
    )
    found, expected = results(case, way, "ordinary")
    assert found == expected


@pytest.mark.parametrize("way", WAYS)
def test_the_size_of_a_block_makes_no_difference(way: Way) -> None:
    case = packed_fp8_case(dtype=torch.float32, tokens=4, head_dim=72, pages_per_chunk=7)
    found = [results(case, way, "ordinary", most)[0] for most in (1, 2, 32, 256, 512)]
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_is_quantised_alike(dtype: torch.dtype) -> None:
    # A head has consecutive ones: of about one size, so that few of them become 0.
    case = packed_fp8_case(dtype=dtype, num_planes=1, heads=256, head_dim=256, pages_per_chunk=1)

    def fill() -> None:
        case.fill()
        case.memories[0].array[:] = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)

    fill()
    run_emulated(case, "gather")
    found = case.contents()
    fill()
    case.run("gather")
    assert case.contents() == found


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_is_dequantised_alike_by_scales_of_any_size(dtype: torch.dtype) -> None:
    case = packed_fp8_case(dtype=dtype, num_planes=1, heads=999, head_dim=256, pages_per_chunk=1)
    codes = np.tile(np.arange(256, dtype=np.uint8), 999)

    def fill() -> None:
        case.fill()
        case.chunk_memory.array[: len(codes)] = codes

    fill()
    run_emulated(case, "scatter")
    found = case.contents()
    fill()
    case.run("scatter")
    assert case.contents() == found


FAULTS = [
    ("(1u << (shift - 1)) - 1 + ((bits >> shift) & 1)", "(1u << (shift - 1))"),  # ties go up
    ("(1u << (shift - 1)) - 1 + ((bits >> shift) & 1)", "0"),  # cut off
    ("shift > 24 ? 0", "shift > 23 ? 0"),
    ("in_units(magnitude, 9)", "in_units(magnitude, 10)"),
    ("in_units(magnitude, 24)", "in_units(magnitude, 23)"),
    ("magnitude >= 0x43e00000u", "magnitude > INFINITE"),  # no saturation
    ("bits < SMALLEST_NORMAL ? SMALLEST_NORMAL : bits", "bits"),
    ("if (largest == 0) return 1.0f;", ""),
    ("magnitude < INFINITE && magnitude > largest", "magnitude > largest"),
    ("if ((x & ~SIGN) > INFINITE) return sign | 0x7fu;", ""),
    ("magnitude > 0x7f7f0000u", "magnitude > INFINITE"),
    ("magnitude > 0x477fe000u", "magnitude >= 0x47800000u"),
    ("(code << 24 & SIGN) | QUIET_NAN", "bits"),
    ("== INFINITE ? bits - 1 : bits", "== INFINITE ? bits : bits"),
    ("__syncthreads();  // the lower", "// the lower"),
    ("__syncthreads();  // every thread", "// every thread"),
    ("half > 1; half /= 2", "half > 2; half /= 2"),
    ("left < GROUP ? left", "left < GROUP ? GROUP"),
    ("inner -= num_inner, middle++", "inner = 0, middle++"),
    ("middle -= num_middle, outer++", "middle = 0, outer++"),
    ("page * plane.page_stride", "page * plane.token_stride"),
    ("head * plane.head_stride", "head * plane.head_dim"),
    ("place * plane.tokens + token", "place + token"),
    ("pages += (u64)row * pages_per_chunk;", ""),
    ("rows[i] * chunk_stride", "i * chunk_stride"),
    ("float scale = scales[head];", "float scale = scales[0];"),
    ("at = payload_bytes + threadIdx.x", "at = payload_bytes + threadIdx.x + 1"),
    ("count == GROUP && is_aligned(to, 8)", "is_aligned(to, 8)"),
]


@pytest.mark.parametrize(("right", "wrong"), FAULTS)
def test_a_kernel_with_a_fault_is_found_out(right: str, wrong: str, tmp_path: Path) -> None:
    text = source_text("fp8.cu")
    assert right in text
    source = tmp_path / "fp8.cu"
    source.write_text(text.replace(right, wrong))
    kernels = compiled(source)
    assert not all(_is_right(*telling, kernels) for telling in _telling_cases())


def test_the_cases_that_find_faults_find_none_in_the_kernel() -> None:
    assert all(_is_right(*telling, emulated("fp8.cu")) for telling in _telling_cases())


def _telling_cases() -> list[tuple[Fp8Case, Content]]:
    """Between them they reach every line of the kernel, last bytes of the memory included."""
    return [
        (
            packed_fp8_case(
                dtype=dtype, tokens=3, heads=3, head_dim=19, pages_per_chunk=5, num_chunks=2
            ),
            content,
        )
        for dtype in DTYPES
        for content in CONTENTS
    ]


def _is_right(case: Fp8Case, content: Content, kernels: Emulated) -> bool:
    for way in WAYS:
        case.fill(content)
        run_emulated(case, way, most_threads=8, kernels=kernels)
        try:
            found = case.contents()
        except AssertionError:
            return False
        case.fill(content)
        case.run(way)
        if found != case.contents():
            return False
    return True
