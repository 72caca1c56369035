from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rootcellar.bench import device_exact
from rootcellar.bench.device_budget import Part
from rootcellar.bench.device_pages import NAMES, Moved, engine_pages
from rootcellar.bench.device_scale import MEMCHECK
from rootcellar.bench.device_section import Site
from rootcellar.kernels import PagedKV

SEED = 3


def moved(name: str) -> Moved:
    """Some pages of the second plane only, to places in two chunks."""
    engine = engine_pages(name, 2, 2, torch.Generator().manual_seed(SEED))
    per_chunk = engine.pages_per_chunk
    return Moved(engine, np.array([3, 0, 7]), np.array([1, per_chunk, 2]), range(1, 2))


def page(kv: PagedKV, number: int) -> bytes:
    """One byte after the other, head after head, token after token."""
    plane = kv.planes[1]
    return bytes(
        int(plane[number, token, head, byte])
        for token in range(plane.shape[1])
        for head in range(plane.shape[2])
        for byte in range(plane.shape[3])
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_oracle_of_a_gather_puts_every_byte_where_it_belongs(name: str) -> None:
    copy = moved(name)
    rows, kv, per_chunk = copy.gathered(), copy.engine.kv, copy.engine.pages_per_chunk
    expected = copy.empty_rows()
    chunks = copy.chunks(expected)
    size = kv.chunk_bytes(1, copy.planes)
    for number, place in zip(copy.pages, copy.places, strict=True):
        chunk, at = divmod(int(place), per_chunk)
        packed = torch.frombuffer(bytearray(page(kv, int(number))), dtype=torch.uint8)
        chunks[chunk, at * size : (at + 1) * size] = packed
    assert torch.equal(rows, expected)


@pytest.mark.parametrize("name", NAMES)
def test_the_oracle_of_a_scatter_undoes_a_gather_and_changes_nothing_else(name: str) -> None:
    copy = moved(name)
    rows, before = copy.gathered(), copy.engine.memory.clone()
    assert torch.equal(copy.scattered(rows), before)
    copy.engine.memory.zero_()
    after = copy.engine.view(copy.scattered(rows))
    kept = copy.engine.view(before)
    for number in range(kept.num_pages):
        assert not after.planes[0][number].any()
        wanted = kept.planes[1][number] if number in copy.pages else torch.zeros(1).byte()
        assert torch.equal(after.planes[1][number], wanted.expand_as(after.planes[1][number]))


def exact() -> list[str]:
    site = Site(device=torch.device("cpu"), directory=Path(), seed=0, scale=MEMCHECK)
    return device_exact.measure(site, Part(60, lambda fraction: None)).wrong


def test_the_kernels_are_exact() -> None:
    assert exact() == []


@pytest.mark.parametrize("kernel", ["gather", "scatter"])
def test_a_byte_written_beside_chunks_or_pages_is_found(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(device_exact, kernel)

    def overwriting(source: Any, target: Any, *given: Any, **how: Any) -> None:
        real(source, target, *given, **how)
        written = given[0] if kernel == "gather" else target.planes[0]
        memory = torch.empty(0, dtype=torch.uint8).set_(written.untyped_storage())
        memory[0] += 1

    monkeypatch.setattr(device_exact, kernel, overwriting)
    wrong = exact()
    assert wrong
    assert all(what.startswith(kernel) for what in wrong)


@pytest.mark.parametrize("kernel", ["gather", "scatter"])
def test_a_kernel_that_does_nothing_is_found(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_exact, kernel, lambda *given, **how: None)
    assert len(exact()) == 14
