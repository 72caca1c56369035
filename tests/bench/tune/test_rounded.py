"""Numbers are rounded so that a person reads them at once, and never to something else."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootcellar.bench.tune.rounded import count, number, points, seconds, share, size

FACTORS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50, "bytes": 1}
LETTERS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
TIMES = {"µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        (size(64 * 2**30), "64 GiB"),
        (size(2.44 * 2**40), "2.4 TiB"),
        (size(1023.9 * 2**30), "1 TiB"),
        (size(17), "17 bytes"),
        (share(0.342), "34 %"),
        (share(0.0525), "5.2 %"),
        (share(0.9636), "96.4 %"),
        (share(0.95), "95 %"),
        (share(0.0001), "under 0.1 %"),
        (share(0), "0 %"),
        (share(1), "100 %"),
        (points(0.041), "4.1 points"),
        (points(0.01), "1 point"),
        (points(0.02), "2 points"),
        (seconds(0.34), "340 ms"),
        (seconds(1.94), "1.9 s"),
        (seconds(0.9996), "1 s"),
        (seconds(180), "3 min"),
        (seconds(0), "0 s"),
        (count(4_700_000), "4.7 M"),
        (count(512), "512"),
        (number(0.0123), "0.012"),
        (number(33.2), "33"),
        (number(12_400), "12,400"),
        (number(0), "0"),
    ],
)
def test_numbers_are_said_as_people_say_them(said: str, wanted: str) -> None:
    assert said == wanted


def _value(said: str, units: dict[str, float]) -> float:
    found = re.fullmatch(r"([\d,.]+) ?(\D*)", said)
    assert found is not None, said
    return float(found[1].replace(",", "")) * units[found[2].strip()]


@given(st.floats(1, 2**59))
def test_a_size_says_its_bytes_to_six_percent(num_bytes: float) -> None:
    exact = {unit: float(factor) for unit, factor in FACTORS.items()}
    assert _value(size(num_bytes), exact) == pytest.approx(num_bytes, rel=0.06, abs=0.5)


@given(st.floats(1e-6, 1e8))
def test_a_time_says_its_seconds_to_six_percent(time_s: float) -> None:
    assert _value(seconds(time_s), TIMES) == pytest.approx(time_s, rel=0.06)


@given(st.floats(0, 1e15))
def test_a_count_and_a_number_say_what_they_are_to_six_percent(value: float) -> None:
    assert _value(count(value), LETTERS) == pytest.approx(value, rel=0.06, abs=0.06)
    assert float(number(value).replace(",", "")) == pytest.approx(value, rel=0.06)


@given(st.floats(0, 1))
def test_a_share_is_off_by_half_a_percent_at_most_and_a_difference_by_a_tenth(
    fraction: float,
) -> None:
    if not share(fraction).startswith("under"):
        assert float(share(fraction).removesuffix(" %")) == pytest.approx(100 * fraction, abs=0.51)
    assert float(points(fraction).split()[0]) == pytest.approx(100 * fraction, abs=0.051)
