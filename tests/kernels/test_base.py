import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from rootcellar.kernels import base, cpu, gather, scatter, torch_index

ROOT = Path(__file__).parents[2]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.float8_e4m3fn]
DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
BACKENDS = [base, cpu, torch_index]

shapes = st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 80), st.integers(1, 3))
head_dims = st.sampled_from([1, 3, 8, 16])


def noise(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Any bytes at all, NaN patterns included."""
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8)
    return raw.view(dtype).to(device)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def runs_and_jumps(num_slots: int) -> st.SearchStrategy[list[int]]:
    """Slots in any order, with repeats, and with runs long enough to be moved as slices."""
    run = st.tuples(st.integers(0, num_slots - 1), st.integers(1, num_slots)).map(
        lambda r: list(range(r[0], min(num_slots, r[0] + r[1])))
    )
    return st.lists(run, max_size=6).map(lambda found: [slot for r in found for slot in r])


def distinct(slots: list[int]) -> list[int]:
    return list(dict.fromkeys(slots))


@pytest.mark.parametrize("backend", BACKENDS, ids=["dispatch", "cpu", "torch_index"])
@given(data=st.data(), shape=shapes, head_dim=head_dims, dtype=st.sampled_from(DTYPES))
@settings(max_examples=100, deadline=None)
def test_gather_is_what_torch_indexing_reads(
    backend: Any, data: st.DataObject, shape: tuple[int, ...], head_dim: int, dtype: torch.dtype
) -> None:
    pages = noise((*shape, head_dim), dtype)
    slots = np.array(data.draw(runs_and_jumps(shape[2])), np.int64)
    out = noise((*shape[:2], len(slots), shape[3], head_dim), dtype)
    backend.gather(pages, slots, out)
    expected = pages.view(torch.uint8)[:, :, torch.from_numpy(slots)]
    assert torch.equal(out.view(torch.uint8), expected)


@pytest.mark.parametrize("backend", BACKENDS, ids=["dispatch", "cpu", "torch_index"])
@given(data=st.data(), shape=shapes, head_dim=head_dims, dtype=st.sampled_from(DTYPES))
@settings(max_examples=100, deadline=None)
def test_scatter_writes_its_slots_and_no_others(
    backend: Any, data: st.DataObject, shape: tuple[int, ...], head_dim: int, dtype: torch.dtype
) -> None:
    pages = noise((*shape, head_dim), dtype)
    slots = np.array(distinct(data.draw(runs_and_jumps(shape[2]))), np.int64)
    chunk = noise((*shape[:2], len(slots), shape[3], head_dim), dtype)
    expected = pages.clone()
    expected.view(torch.uint8)[:, :, torch.from_numpy(slots)] = chunk.view(torch.uint8)
    backend.scatter(chunk, pages, slots)
    assert same_bytes(pages, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_gives_back_what_scatter_was_given(device: str, dtype: torch.dtype) -> None:
    pages = noise((3, 2, 600, 2, 8), dtype, device)
    chunk = noise((3, 2, 256, 2, 8), dtype, device)
    slots = np.random.default_rng(0).permutation(600)[:256]
    scatter(chunk, pages, slots)
    out = torch.zeros_like(chunk)
    gather(pages, slots, out)
    assert same_bytes(out, chunk)


@pytest.mark.parametrize("slots", [[], [4], list(range(3, 9)), [5, 4, 3], [2, 2, 2]])
@pytest.mark.parametrize("device", DEVICES)
def test_slots_may_be_a_list_of_any_length_and_order(slots: list[int], device: str) -> None:
    pages = noise((2, 1, 10, 1, 4), torch.bfloat16, device)
    out = torch.empty((2, 1, len(slots), 1, 4), dtype=torch.bfloat16, device=device)
    gather(pages, slots, out)
    assert same_bytes(out, torch.stack([pages[:, :, s] for s in slots], 2) if slots else out)


def test_slots_may_be_read_only() -> None:
    pages = noise((1, 2, 8, 1, 4), torch.float16)
    slots = np.frombuffer(np.array([6, 1], np.int64).tobytes(), np.int64)
    chunk = noise((1, 2, 2, 1, 4), torch.float16)
    for backend in (base, torch_index):
        backend.scatter(chunk, pages, slots)
        assert same_bytes(pages[:, :, [6, 1]], chunk)


PAGES = (2, 2, 8, 1, 4)
BAD: list[tuple[Any, tuple[int, ...], torch.dtype, str]] = [
    ([0, 8], (2, 2, 2, 1, 4), torch.float16, r"slots\[1\] is 8, must be from 0 to 7"),
    ([-1, 0], (2, 2, 2, 1, 4), torch.float16, r"slots\[0\] is -1"),
    ([0.0, 1.0], (2, 2, 2, 1, 4), torch.float16, "slots are float64"),
    ([[0], [1]], (2, 2, 2, 1, 4), torch.float16, "slots are int64"),
    ([0, 1], (2, 2, 3, 1, 4), torch.float16, "must be contiguous"),
    ([0, 1], (2, 1, 2, 1, 4), torch.float16, "must be contiguous"),
    ([0, 1], (2, 2, 2, 1, 4), torch.bfloat16, "bfloat16 on cpu, pages torch.float16"),
]


@pytest.mark.parametrize(("slots", "shape", "dtype", "message"), BAD)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    slots: Any, shape: tuple[int, ...], dtype: torch.dtype, message: str
) -> None:
    pages, chunk = noise(PAGES, torch.float16), noise(shape, dtype)
    pages_before, chunk_before = pages.clone(), chunk.clone()
    with pytest.raises(ValueError, match=message):
        gather(pages, slots, chunk)
    with pytest.raises(ValueError, match=message):
        scatter(chunk, pages, slots)
    assert same_bytes(pages, pages_before)
    assert same_bytes(chunk, chunk_before)


def test_tensors_with_gaps_are_refused() -> None:
    pages, chunk = noise(PAGES, torch.float16), noise((2, 2, 4, 1, 4), torch.float16)
    with pytest.raises(ValueError, match=r"chunk .* must be contiguous"):
        scatter(chunk[:, :, ::2], pages, [0, 1])
    with pytest.raises(ValueError, match=r"pages .* must be contiguous"):
        gather(pages[:, :, ::2], [0, 1], chunk[:, :, :2].contiguous())


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
