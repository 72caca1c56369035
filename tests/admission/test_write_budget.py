import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootcellar.admission.write_budget import WriteBudget

worths = st.lists(st.floats(-1e6, 1e6), max_size=20)
offers = st.tuples(st.floats(0, 50), st.integers(0, 1000), worths, st.booleans())


@given(st.lists(offers, max_size=40), st.floats(0, 1000), st.floats(0, 10_000))
def test_never_more_is_granted_than_the_burst_and_what_was_earned(
    steps: list[tuple[float, int, list[float], bool]], rate: float, burst: float
) -> None:
    budget = WriteBudget(rate_bytes_s=rate, burst_bytes=burst)
    now_s = granted_bytes = 0.0
    budget.advance(0.0)
    for wait_s, chunk_bytes, worth, whole in steps:
        now_s += wait_s
        budget.advance(now_s)
        granted = budget.spend(chunk_bytes, worth, whole=whole)
        assert granted in ((0, len(worth)) if whole else range(len(worth) + 1))
        granted_bytes += granted * chunk_bytes
        assert granted_bytes <= (burst + rate * now_s) * (1 + 1e-9)
        assert budget.tokens_bytes >= 0


@pytest.mark.parametrize("seed", range(3))
def test_a_scarce_budget_goes_to_the_best_of_what_is_offered(seed: int) -> None:
    """Four times too much is offered: the best quarter is worth 0.875 on average."""
    rng = random.Random(seed)
    budget = WriteBudget(rate_bytes_s=0.25, burst_bytes=200)
    granted: list[float] = []
    for reference in range(40_000):
        budget.advance(float(reference))
        worth = rng.random()
        granted += [worth] * budget.spend(1, [worth])
    assert len(granted) > 0.95 * 0.25 * 40_000
    assert sum(granted) / len(granted) > 0.84


def test_the_best_seldom_find_the_budget_spent() -> None:
    """The bucket is kept half full for them, also when whole chains of 16 are wanted."""
    rng = random.Random(0)
    budget = WriteBudget(rate_bytes_s=4.0, burst_bytes=3200)
    best = granted = 0
    for request in range(5_000):
        budget.advance(float(request))
        worth = rng.random()
        whole = budget.spend(1, [worth] * 16, whole=True)
        best += worth > 0.95
        granted += whole > 0 and worth > 0.95
    assert granted > 0.98 * best


def test_it_does_not_overshoot_at_the_start() -> None:
    rng, rate = random.Random(0), 0.15
    budget = WriteBudget(rate_bytes_s=rate, burst_bytes=50)
    granted = 0
    for reference in range(10_000):
        budget.advance(float(reference))
        granted += budget.spend(1, [rng.random()])
        assert granted <= 50 + rate * reference
    assert granted > 0.9 * rate * 10_000


def test_what_is_worth_the_same_is_served_as_it_comes() -> None:
    budget = WriteBudget(rate_bytes_s=1.0, burst_bytes=10)
    granted = 0
    for reference in range(1000):
        budget.advance(float(reference))
        granted += budget.spend(4, [1.0])
    assert 240 <= granted <= 253


def test_after_a_quiet_night_everything_is_granted() -> None:
    budget = WriteBudget(rate_bytes_s=1.0, burst_bytes=10_000)
    for reference in range(2000):
        budget.advance(float(reference))
        budget.spend(100, [reference % 7])
    budget.advance(1e6)
    assert budget.spend(100, [0.0, 0.0, 0.0]) == 3


def test_a_chunk_is_worth_what_the_best_behind_it_is() -> None:
    budget = WriteBudget(rate_bytes_s=0.0, burst_bytes=8)
    assert budget.spend(1, [0.1, 0.9, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2]) == 8
    budget.restore(WriteBudget(rate_bytes_s=0.0, burst_bytes=6).save())  # 2 over half full
    assert budget.spend(1, [0.1, 0.1, 0.95, 0.1]) == 3


def test_what_is_of_use_as_a_whole_only_is_not_begun() -> None:
    budget = WriteBudget(rate_bytes_s=1.0, burst_bytes=3)
    assert budget.spend(1, [1.0] * 4, whole=True) == 0
    assert budget.tokens_bytes == 3
    assert budget.spend(1, [1.0] * 4) == 3


def test_a_restart_brings_no_new_burst() -> None:
    first, second = (WriteBudget(rate_bytes_s=1.0, burst_bytes=10) for _ in range(2))
    first.spend(1, [1.0] * 7)
    assert second.restore(first.save())
    assert second.tokens_bytes == 3


@pytest.mark.parametrize("data", [b"", b"garbage", b"nan", b"inf", b"-0x1p3", b"\xff"])
def test_tokens_that_make_no_sense_are_ignored(data: bytes) -> None:
    budget = WriteBudget(rate_bytes_s=1.0, burst_bytes=10)
    assert not budget.restore(data)
    assert budget.tokens_bytes == 10


def test_a_save_of_a_larger_burst_is_cut_to_this_one() -> None:
    budget = WriteBudget(rate_bytes_s=1.0, burst_bytes=10)
    assert budget.restore(WriteBudget(rate_bytes_s=1.0, burst_bytes=99).save())
    assert budget.tokens_bytes == 10


def test_a_drive_write_per_day_is_the_drive_in_24_hours() -> None:
    budget = WriteBudget.dwpd(2.4e12, 0.5)
    assert budget.tokens_bytes == pytest.approx(0.05e12)  # an hour of it to begin with
    budget.advance(0.0)
    budget.spend(1, [1.0])
    assert WriteBudget.per_day(86_400, burst_bytes=7).tokens_bytes == 7


def test_a_clock_that_runs_backwards_earns_nothing() -> None:
    budget = WriteBudget(rate_bytes_s=1.0, burst_bytes=10)
    budget.spend(1, [1.0] * 10)
    for now_s in (100.0, 50.0, 100.0):
        budget.advance(now_s)
        assert budget.tokens_bytes == 0


@pytest.mark.parametrize("field", ["rate_bytes_s", "burst_bytes"])
@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_a_rate_or_burst_that_is_none_is_refused_by_name(field: str, value: float) -> None:
    values = {"rate_bytes_s": 1.0, "burst_bytes": 1.0, field: value}
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        WriteBudget(rate_bytes_s=values["rate_bytes_s"], burst_bytes=values["burst_bytes"])


def test_offers_from_before_the_clock_began_do_no_harm() -> None:
    """What a restart finds is offered before any request."""
    budget = WriteBudget(rate_bytes_s=1.0, burst_bytes=10.0)
    assert budget.spend(1, [0.5, 0.5]) <= 2
    budget.advance(1e6)
    assert budget.spend(1, [0.5]) <= 1
