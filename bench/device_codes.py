"""Section: the kernels that compute, byte for byte against code that is not ours.

Quantised chunks against torch's own float8 and its division, on the CPU, where neither takes a
short cut; checksums against the xxhash package.
"""

from __future__ import annotations

import numpy as np
import torch
import xxhash

from ..kernels import PagedKV
from ..kernels.fp8 import fp8_chunk_bytes, gather_fp8, scatter_fp8
from ..kernels.xxh3 import xxh3_128
from .device_budget import Part
from .device_pages import noise
from .device_section import Findings, Row, Site

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_E4M3 = torch.float8_e4m3fn
_E4M3_MAX = 448.0
_ROW_BYTES = (241, 1024, 1025, 64 << 10, (1 << 20) + 3)
_NUM_ROWS = 3


def measure(site: Site, part: Part) -> Findings:
    """Once: what is exact once is exact again."""
    found = Findings()
    for dtype in _DTYPES:
        found.rows += _check_quantised(site, dtype)
    for row_bytes in _ROW_BYTES:
        found.rows.append(_check_digests(site, row_bytes))
    found.wrong = [f"{row['kernel']}: {row['case']}" for row in found.rows if not row["exact"]]
    return found


def _check_quantised(site: Site, dtype: torch.dtype) -> list[Row]:
    """One plane of two chunks, 4 pages each, of 16 tokens of 4 heads of 80, one of them of the
    smallest numbers there are: half of these are subnormal, which fast arithmetic makes zero."""
    shape = (2, 4, 16, 4, 80)
    states = torch.randn(shape, device=site.device, generator=site.generator())
    states[..., 1, :] *= torch.finfo(dtype).tiny
    states = states.to(dtype)
    expected_codes, expected_scales = _quantised(states.cpu())
    kv = PagedKV((states.flatten(0, 1).view(torch.uint8),), dtype=dtype)
    size_bytes = fp8_chunk_bytes(kv, 4)
    chunks = torch.zeros((2, size_bytes), dtype=torch.uint8, device=site.device)
    gather_fp8(kv, np.arange(8), chunks, pages_per_chunk=4)
    codes, scales = chunks[:, : expected_codes.shape[1]].cpu(), chunks[:, -16:].cpu()
    quantised = torch.equal(codes, expected_codes) and torch.equal(scales, expected_scales)
    back = states.zero_()
    scatter_fp8(chunks, kv, np.arange(8), pages_per_chunk=4)
    same = torch.equal(back.cpu(), _dequantised(codes, scales, shape, dtype))
    case = str(dtype).removeprefix("torch.")
    return [
        {"kernel": kernel, "case": case, "size_bytes": states.nbytes, "exact": exact}
        for kernel, exact in (("gather_fp8", quantised), ("scatter_fp8", same))
    ]


def _quantised(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of (chunks, pages, tokens, heads, dim), as bytes of each chunk."""
    exact = states.float()
    largest = exact.abs().amax((1, 2, 4), keepdim=True)
    scales = (largest / _E4M3_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    codes = (exact / scales).clamp(-_E4M3_MAX, _E4M3_MAX).to(_E4M3)
    return codes.view(torch.uint8).flatten(1), scales.flatten(1).view(torch.uint8)


def _dequantised(
    codes: torch.Tensor, scales: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    factors = scales.contiguous().view(torch.float32)[:, None, None, :, None]
    return (codes.contiguous().view(_E4M3).view(shape).float() * factors).to(dtype)


def _check_digests(site: Site, row_bytes: int) -> Row:
    rows = noise(_NUM_ROWS * row_bytes, site.generator()).view(_NUM_ROWS, row_bytes)
    expected = b"".join(xxhash.xxh3_128_digest(row.numpy().tobytes()) for row in rows.cpu())
    return {
        "kernel": "xxh3",
        "case": f"rows of {row_bytes} bytes",
        "size_bytes": rows.nbytes,
        "exact": xxh3_128(rows).cpu().numpy().tobytes() == expected,
    }
