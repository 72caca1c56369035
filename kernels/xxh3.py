"""XXH3-128 of rows of bytes where they lie: in GPU memory, they need not come back to be verified.

The same 16 bytes as xxhash.xxh3_128_digest, which does it in CPU memory.
"""

import numpy as np
import torch
import xxhash

LEAST_BYTES = 241
"""Shorter rows are hashed in another way, which has no kernel."""

DIGEST_BYTES = 16


def xxh3_128(rows: torch.Tensor) -> torch.Tensor:
    """(num_rows, 16) uint8, the digest of each row, on the device of `rows`.

    rows: (num_rows, row_bytes) uint8, at least 241 bytes each; may lie apart, from multiples of 16
        bytes on fastest.

    ValueError if they are not. On a GPU this only launches, on the current stream, and takes a
    sixteenth of their bytes there: whoever owns it keeps `rows` as they are until it is done.
    """
    _check(rows)
    if rows.device.type == "cpu":
        return _on_cpu(rows)
    if rows.device.type == "cuda":
        from . import cuda_xxh3  # needs CuPy, which is only there with CUDA

        return cuda_xxh3.digests(rows)
    raise ValueError(f"rows are on {rows.device}, must be on cpu or cuda")


def _on_cpu(rows: torch.Tensor) -> torch.Tensor:
    found = np.empty((len(rows), DIGEST_BYTES), np.uint8)
    for digest, row in zip(found, rows.detach().numpy(), strict=True):
        digest[:] = np.frombuffer(xxhash.xxh3_128_digest(row), np.uint8)
    return torch.from_numpy(found)


def _check(rows: torch.Tensor) -> None:
    if rows.dim() != 2 or rows.dtype != torch.uint8:
        raise ValueError(f"rows are {rows.dtype} {tuple(rows.shape)}, must be uint8, (rows, bytes)")
    if rows.shape[1] < LEAST_BYTES:
        raise ValueError(f"rows have {rows.shape[1]} bytes, must have at least {LEAST_BYTES}")
    if rows.stride(1) != 1:
        raise ValueError(f"rows have strides {rows.stride()}, the last must be 1")
