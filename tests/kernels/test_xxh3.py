import numpy as np
import pytest
import torch
import xxhash

from rootcellar.kernels.xxh3 import xxh3_128

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
SIZES = [241, 1024, 1025, 4096, 100_003]


def noise(num_rows: int, row_bytes: int) -> torch.Tensor:
    found = np.random.default_rng(row_bytes).integers(0, 256, (num_rows, row_bytes), np.uint8)
    return torch.from_numpy(found)


def digests(rows: torch.Tensor) -> list[bytes]:
    return [row.numpy().tobytes() for row in xxh3_128(rows).cpu()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("row_bytes", SIZES)
def test_digests_are_those_of_the_xxhash_package(device: str, row_bytes: int) -> None:
    rows = noise(3, row_bytes)
    expected = [xxhash.xxh3_128_digest(row.numpy().tobytes()) for row in rows]
    assert digests(rows.to(device)) == expected


@pytest.mark.parametrize("device", DEVICES)
def test_rows_may_lie_apart_and_begin_anywhere(device: str) -> None:
    rows = noise(5, 3000).to(device)[::2, 7:2500]
    assert digests(rows) == digests(rows.contiguous())


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows_have_no_digests(device: str) -> None:
    assert xxh3_128(torch.empty((0, 4096), dtype=torch.uint8, device=device)).shape == (0, 16)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (torch.zeros(1000, dtype=torch.uint8), "must be uint8"),
        (torch.zeros((2, 1000), dtype=torch.int8), "must be uint8"),
        (torch.zeros((2, 240), dtype=torch.uint8), "have 240 bytes, must have at least 241"),
        (torch.zeros((1000, 1000), dtype=torch.uint8).T, "the last must be 1"),
        (torch.zeros((2, 1000), dtype=torch.uint8, device="meta"), "rows are on meta"),
    ],
)
def test_rows_that_cannot_be_hashed_are_refused(rows: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        xxh3_128(rows)
