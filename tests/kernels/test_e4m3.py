"""Against torch's conversions, which others wrote, wherever they are defined alike."""

import numpy as np
import numpy.typing as npt
import pytest
import torch

from rootcellar.kernels.e4m3 import (
    LARGEST,
    WORDS,
    dequantised,
    narrow,
    quantised,
    scales_for,
    widen,
)

Bits = npt.NDArray[np.uint32]

SIGN = 0x80000000
HALVES = [torch.bfloat16, torch.float16]
ONE = np.ones(1, np.float32)
EVERY_CODE = np.arange(256, dtype=np.uint8)
EVERY_HALF = np.arange(1 << 16, dtype=np.uint16)


def some_floats() -> Bits:
    """The bits of all with 12 leading bits in every way, and their neighbours; and any bits."""
    heads = np.arange(1 << 13, dtype=np.uint32) << np.uint32(19)
    any_bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, np.uint32)
    return np.concatenate([heads - np.uint32(1), heads, heads + np.uint32(1), any_bits])


def finite(bits: Bits) -> Bits:
    return bits[np.isfinite(bits.view(np.float32))]


def as_torch(bits: Bits) -> torch.Tensor:
    return torch.from_numpy(bits).view(torch.float32)


def float_bits(*values: float) -> Bits:
    return np.array(values, np.float32).view(np.uint32)


@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_widens_to_the_float_of_equal_value(dtype: torch.dtype) -> None:
    found = as_torch(widen(EVERY_HALF, dtype))
    expected = torch.from_numpy(EVERY_HALF).view(dtype).float()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    assert np.array_equal(found.signbit().numpy(), EVERY_HALF >= 0x8000)


@pytest.mark.parametrize("dtype", HALVES)
def test_floats_narrow_to_nearest_even_as_torchs_do_up_to_the_largest(dtype: torch.dtype) -> None:
    bits = finite(some_floats())
    limit = torch.finfo(dtype).max
    found = torch.from_numpy(narrow(bits, dtype)).view(dtype)
    expected = as_torch(bits).clamp(-limit, limit).to(dtype)
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("dtype", WORDS)
def test_what_is_too_large_to_narrow_saturates_and_nan_stays_nan(dtype: torch.dtype) -> None:
    bits = float_bits(np.inf, -np.inf, np.nan, -np.nan)
    words = narrow(bits, dtype)
    found = torch.from_numpy(words).view(dtype)
    limit = torch.finfo(dtype).max
    assert found[:2].tolist() == [limit, -limit]
    assert found[2:].isnan().all()
    # torch's conversions lose the sign of some NaN, so it is looked for in the words.
    assert (words >> (8 * dtype.itemsize - 1)).tolist() == [0, 1, 0, 1]


def test_quantising_by_one_is_torchs_conversion_where_it_does_not_saturate() -> None:
    bits = finite(some_floats())
    clamped = as_torch(bits).clamp(-LARGEST, LARGEST)
    expected = clamped.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(quantised(bits, ONE), expected)


def test_infinities_saturate_and_nan_keeps_its_sign() -> None:
    bits = float_bits(np.inf, -np.inf, np.nan, -np.nan, 449, -1e30, 0.0, -0.0)
    found = quantised(bits, ONE).tolist()
    assert found == [0x7E, 0xFE, 0x7F, 0xFF, 0x7E, 0xFE, 0x00, 0x80]


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (17, 0x58),  # between 16 and 18
        (19, 0x5A),  # between 18 and 20
        (2**-10, 0x00),  # between 0 and the smallest
        (3 * 2**-10, 0x02),  # between the smallest and its double
        (2**-6 - 2**-10, 0x08),  # between the largest subnormal and the smallest normal
        (432, 0x7E),  # between the two largest
    ],
)
def test_half_way_goes_to_the_even_code(value: float, code: int) -> None:
    assert quantised(float_bits(value, -value), ONE).tolist() == [code, code | 0x80]


def test_every_code_has_the_value_torch_gives_it() -> None:
    found = torch.from_numpy(dequantised(ONE, torch.float32)[0])
    expected = torch.from_numpy(EVERY_CODE).view(torch.float8_e4m3fn).float()
    found = found.view(torch.float32)
    assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))
    assert torch.equal(found.signbit(), expected.signbit())


@pytest.mark.parametrize("dtype", WORDS)
def test_every_number_of_e4m3_comes_back_as_it_was(dtype: torch.dtype) -> None:
    words = dequantised(ONE, dtype)[0]
    assert np.array_equal(quantised(widen(words, dtype), ONE), EVERY_CODE)


@pytest.mark.parametrize("scale", [np.inf, np.nan, 0.0, -2.0, 1e-45, 3e38])
@pytest.mark.parametrize("dtype", WORDS)
def test_no_scale_makes_an_infinity(dtype: torch.dtype, scale: float) -> None:
    found = dequantised(np.array([scale], np.float32), dtype)
    assert not torch.from_numpy(found).view(dtype).float().isinf().any()


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ([0.0, -0.0], 1.0),
        ([], 1.0),
        ([np.nan, np.inf, -np.inf], 1.0),
        ([1.0, -896.0, np.nan, np.inf], 2.0),
        ([448 * 2.0**-126], 2.0**-126),
        ([447 * 2.0**-126], 2.0**-126),
        ([2.0**-149], 2.0**-126),
        ([float(np.finfo(np.float32).max)], float(np.finfo(np.float32).max) / 448),
    ],
)
def test_the_scale_turns_the_largest_finite_magnitude_into_448(
    values: list[float], scale: float
) -> None:
    found = scales_for(float_bits(0.0, *values), axes=(0,))
    assert found.tolist() == [scale]


@pytest.mark.parametrize("dtype", WORDS)
@pytest.mark.parametrize("exponent", [-149, -140, -126, -100, -20, -1, 0, 9, 60, 119])
def test_the_error_is_within_its_bound(dtype: torch.dtype, exponent: int) -> None:
    limit = torch.finfo(dtype)
    rng = np.random.default_rng(exponent + 200)
    values = np.ldexp(rng.standard_normal(4096) * rng.choice([1, 2.0**-8], 4096), exponent)
    x = torch.from_numpy(values).clamp(limit.min, limit.max).to(dtype)
    bits = widen(x.view(torch.uint8).numpy().view(WORDS[dtype]), dtype)
    scale = scales_for(bits, axes=(0,))
    table = torch.from_numpy(dequantised(scale, dtype)[0]).view(dtype).double().numpy()
    exact, found = x.double().numpy(), table[quantised(bits, scale)]
    unit = float(scale[0])
    of_fp8 = np.minimum(np.maximum(np.abs(exact) / 16, unit / 1024), unit * 16)
    # Half a unit of the dtype, of the result, whose magnitude is at most 17/16 of x's; or half its
    # smallest number.
    of_dtype = np.maximum(
        np.abs(exact) * 17 / 16 * limit.eps / 2, limit.smallest_normal * limit.eps / 2
    )
    bound = of_fp8 * (1 + 2.0**-20) + of_dtype
    assert (np.abs(exact - found) <= bound).all()
