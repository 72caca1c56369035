"""csrc/xxh3.cu on the CPU against the xxhash package, by the same plan as on a GPU."""

from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import xxhash
from hypothesis import example, given, settings

from rootcellar.kernels.compile import source_text
from rootcellar.kernels.cuda_xxh3 import plan, sum_words

from .emulation import Emulated, Guarded, compiled, emulated

# Around the ends of stripes and blocks, and of what is folded at once.
TELLING_SIZES = [241, 255, 256, 257, 1023, 1024, 1025, 1088, 1089, 16_383, 16_385, 17_408, 17_409]
TELLING_SIZES += [32_769, 33_793, 40_000]


def emulated_digests(
    rows: torch.Tensor, *, block: int = 32, kernels: Emulated | None = None
) -> list[bytes]:
    """Fails if anything but sums and digests was written."""
    sums, found = Guarded(8 * sum_words(rows)), Guarded(16 * len(rows))
    sums.array[:] = 0xEE  # a GPU's memory is not cleared either
    for step in plan(rows, sums.address, found.address, block=block):
        library = kernels or emulated("xxh3.cu")
        library.launch(step.kernel, step.grid, step.block, *step.arguments)
    sums.check()
    found.check()
    return [digest.tobytes() for digest in found.array.reshape(-1, 16)]


def guarded_rows(
    num_rows: int, row_bytes: int, gap: int, misalign: int
) -> tuple[torch.Tensor, Guarded]:
    stride = row_bytes + gap
    memory = Guarded((num_rows - 1) * stride + row_bytes, misalign)
    memory.array[:] = np.random.default_rng(row_bytes).integers(0, 256, len(memory.array), np.uint8)
    rows = torch.from_numpy(memory.array).as_strided((num_rows, row_bytes), (stride, 1))
    return rows, memory


def expected_digests(rows: torch.Tensor) -> list[bytes]:
    return [xxhash.xxh3_128_digest(row.numpy().tobytes()) for row in rows]


@given(
    num_rows=st.integers(1, 3),
    row_bytes=st.integers(241, 5000) | st.integers(241, 70_000),
    gap=st.sampled_from([0, 1, 16]),
    misalign=st.sampled_from([0, 0, 1, 8, 16]),
    block=st.sampled_from([4, 32, 128]),
)
@example(num_rows=2, row_bytes=17 * 1024, gap=0, misalign=0, block=32)
@settings(max_examples=100)
def test_digests_are_those_of_the_xxhash_package(
    num_rows: int, row_bytes: int, gap: int, misalign: int, block: int
) -> None:
    rows, memory = guarded_rows(num_rows, row_bytes, gap, misalign)
    before = memory.array.tobytes()
    assert emulated_digests(rows, block=block) == expected_digests(rows)
    memory.check()
    assert memory.array.tobytes() == before


@pytest.mark.parametrize("row_bytes", TELLING_SIZES)
@pytest.mark.parametrize("misalign", [0, 1])
def test_rows_may_end_anywhere_in_a_block(row_bytes: int, misalign: int) -> None:
    rows, _ = guarded_rows(2, row_bytes, 0, misalign)
    assert emulated_digests(rows) == expected_digests(rows)


@pytest.mark.parametrize("at", [0, 63, 64, 1023, 1024, 8191, 8192, 9000, 9999])
def test_any_bit_that_turns_over_changes_the_digest(at: int) -> None:
    rows, _ = guarded_rows(1, 10_000, 0, 0)
    before = emulated_digests(rows)
    rows[0, at] ^= 1
    assert emulated_digests(rows) != before


@pytest.mark.parametrize("row_bytes", [241, 1025, 16_385, 33_793])
def test_folding_asks_for_no_sum_behind_its_memory(row_bytes: int, tmp_path: Path) -> None:
    watched = source_text("xxh3.cu").replace("= sums[k * LANES]", "= watched(sums + k * LANES)")
    source = tmp_path / "xxh3.cu"
    source.write_text(WATCH + watched)
    kernels = compiled(source)
    rows, _ = guarded_rows(2, row_bytes, 0, 0)
    sums, found, last = Guarded(8 * sum_words(rows)), Guarded(32), Guarded(8)
    for step in plan(rows, sums.address, found.address):
        kernels.launch(step.kernel, step.grid, step.block, *step.arguments)
    kernels.launch("report", 1, 1, last.address)
    at = int(last.array.view(np.uint64)[0]) - sums.address
    assert 0 < at <= len(sums.array) - 8


WATCH = """
static const unsigned long long* last;
static unsigned long long watched(const unsigned long long* from) {
  if (from > last) last = from;
  return *from;
}
extern "C" void report(const unsigned long long** to) { *to = last; }
"""


def test_no_rows_take_no_launch() -> None:
    assert plan(torch.empty((0, 4096), dtype=torch.uint8), 0, 0) == ()


FAULTS = [
    ("block + s * STRIPE_BYTES + summer", "block + (s ^ 1) * STRIPE_BYTES + summer"),
    ("SECRET[s + 2 * summer + 1]);\n  }", "SECRET[s + 2 * summer]);\n  }"),
    ("+ data.odd", "+ data.even"),
    ("(even & 0xffffffffu) * (even >> 32)", "even * (even >> 32)"),
    ("(end - block - 1) / STRIPE_BYTES", "(end - block) / STRIPE_BYTES"),
    ("end - STRIPE_BYTES + at", "block + at"),
    ("secret_at(121 + at)", "secret_at(120 + at)"),
    ("secret_at(129 + at)", "secret_at(130 + at)"),
    ("(row_bytes - 1) / BLOCK_BYTES;\n  u32 i", "row_bytes / BLOCK_BYTES;\n  u32 i"),
    ("row * row_stride", "row * row_bytes"),
    ("index > num_blocks", "index >= num_blocks"),
    ("lane >> 47", "lane >> 46"),
    ("sums += AHEAD * LANES", "sums += AHEAD"),
    ("if (k < left)", "if (k <= left)"),
    ("return lane + sums[left * LANES]", "return lane"),
    ("__syncthreads();", ""),
    ("~(row_bytes * PRIME64_2)", "row_bytes * PRIME64_2"),
    ("(cross >> 32) + (middle >> 32)", "(cross >> 32)"),
    ("56 - 8 * k", "8 * k"),
]


@pytest.mark.parametrize(("right", "wrong"), FAULTS)
def test_a_kernel_with_a_fault_is_found_out(right: str, wrong: str, tmp_path: Path) -> None:
    text = source_text("xxh3.cu")
    assert right in text
    source = tmp_path / "xxh3.cu"
    source.write_text(text.replace(right, wrong))
    assert not all(_are_right(compiled(source)))


def test_the_rows_that_find_faults_find_none_in_the_kernel() -> None:
    assert all(_are_right(emulated("xxh3.cu")))


def _are_right(kernels: Emulated) -> list[bool]:
    tried = [
        guarded_rows(2, size, 16, misalign)[0] for size in TELLING_SIZES for misalign in (0, 1)
    ]
    return [emulated_digests(rows, kernels=kernels) == expected_digests(rows) for rows in tried]
