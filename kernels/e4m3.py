"""float32, bfloat16, float16 and e4m3 (the "fn" kind: no infinity, 448 at most, NaN 0x7f) in numpy.

Byte for byte what csrc/e4m3.cuh computes, by other means where numpy has them. Words are the bits
of an element as an unsigned integer of its size, `bits` those of a float32.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Words = npt.NDArray[Any]
Bits = npt.NDArray[np.uint32]
Codes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

WORDS: dict[torch.dtype, type[np.uint16] | type[np.uint32]] = {
    torch.bfloat16: np.uint16,
    torch.float16: np.uint16,
    torch.float32: np.uint32,
}
"""What pages may hold, and the words of it."""

LARGEST = 448

_SIGN = np.uint32(0x80000000)
_INFINITE = np.uint32(0x7F800000)
_QUIET_NAN = np.uint32(0x7FC00000)
_SMALLEST_NORMAL = np.float32(2.0**-126)


def widen(words: Words, dtype: torch.dtype) -> Bits:
    """Of the float32 of equal value."""
    if dtype == torch.float32:
        return words
    if dtype == torch.bfloat16:
        return words.astype(np.uint32) << np.uint32(16)
    return words.view(np.float16).astype(np.float32).view(np.uint32)


def narrow(bits: Bits, dtype: torch.dtype) -> Words:
    """To nearest, ties to even; too large and infinite ones saturate. A NaN must be quiet."""
    if dtype == torch.bfloat16:
        signs, magnitudes = bits & _SIGN, bits & ~_SIGN
        finite = _shifted_even(np.minimum(magnitudes, np.uint32(0x7F7F0000)), 16)
        kept = np.where(magnitudes > _INFINITE, magnitudes >> np.uint32(16), finite)
        return (signs >> np.uint32(16) | kept).astype(np.uint16)
    limits = np.finfo(np.float16 if dtype == torch.float16 else np.float32)
    values = np.clip(bits.view(np.float32), np.float32(limits.min), np.float32(limits.max))
    return values.astype(limits.dtype).view(WORDS[dtype])


def scales_for(bits: Bits, axes: tuple[int, ...]) -> Floats:
    """What turns the largest finite magnitude into LARGEST; over those axes, which are kept.

    Never subnormal: such a scale would itself have too few bits.
    """
    magnitudes = bits & ~_SIGN
    finite = np.where(magnitudes < _INFINITE, magnitudes, np.uint32(0))
    largest = finite.max(axis=axes, keepdims=True).view(np.float32)
    scales = np.maximum(largest / np.float32(LARGEST), _SMALLEST_NORMAL)
    return np.where(largest == 0, np.float32(1), scales)


def quantised(bits: Bits, scales: Floats) -> Codes:
    """The e4m3 number nearest to x / scale, ties to even; too large and infinite ones saturate."""
    magnitudes = bits & ~_SIGN
    with np.errstate(all="ignore"):
        scaled = magnitudes.view(np.float32) / scales
    small = np.minimum(scaled, np.float32(LARGEST)).view(np.uint32)
    normal = _shifted_even(small, 20) - np.uint32(120 << 3)
    # Added to a float whose last bit counts 2^-9, a smaller one is rounded to that.
    unit = np.float32(2.0**14)
    subnormal = (np.minimum(scaled, unit) + unit).view(np.uint32) - unit.view(np.uint32)
    finite: Bits = np.where(scaled < np.float32(2.0**-6), subnormal, normal)
    codes: Bits = np.where(magnitudes > _INFINITE, np.uint32(0x7F), finite)
    return (codes | (bits & _SIGN) >> np.uint32(24)).astype(np.uint8)


def dequantised(scales: Floats, dtype: torch.dtype) -> Words:
    """Words of value * scale, in `dtype`, for each of the 256 codes, along a new last axis.

    A NaN keeps nothing but the sign of its code: which one a product gives differs between
    processors.
    """
    with np.errstate(all="ignore"):
        bits = (_VALUES * scales[..., None]).view(np.uint32)
    is_nan = (bits & ~_SIGN) > _INFINITE
    return narrow(np.where(is_nan, _SIGNS | _QUIET_NAN, bits), dtype)


def _shifted_even(bits: Bits, shift: int) -> Bits:
    """Rounded to nearest, ties to even."""
    half = np.uint32((1 << (shift - 1)) - 1)
    return (bits + half + (bits >> np.uint32(shift) & np.uint32(1))) >> np.uint32(shift)


_CODES = np.arange(256, dtype=np.uint32)
_SIGNS = (_CODES & np.uint32(0x80)) << np.uint32(24)


def _values() -> Floats:
    """Of all codes."""
    exponents, fractions = (_CODES >> 3 & 15).astype(np.int32), _CODES & 7
    significands = np.where(exponents > 0, fractions + 8, fractions).astype(np.float32)
    values = np.ldexp(significands, np.maximum(exponents, 1) - 10)
    values[(_CODES & 0x7F) == 0x7F] = np.nan
    signed: Floats = np.copysign(values, _SIGNS.view(np.float32))
    return signed


_VALUES = _values()
