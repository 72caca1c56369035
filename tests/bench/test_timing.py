import gc
import json
from functools import partial

import hypothesis.strategies as st
import pytest
from hypothesis import given

from rootcellar.bench.timing import (
    environment,
    interleave,
    median_ratio,
    paused_gc,
    percentile,
    spread,
    time_each,
)


def test_rivals_take_turns_in_an_order_that_changes() -> None:
    calls: list[str] = []

    def rival(name: str) -> int:
        calls.append(name)
        return len(calls)

    results = interleave({name: partial(rival, name) for name in "abc"}, rounds=20)
    rounds = [tuple(calls[i : i + 3]) for i in range(0, 60, 3)]
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)
    assert len(set(rounds)) > 1
    assert results["b"] == [i + 1 for i, name in enumerate(calls) if name == "b"]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_a_percentile_is_the_smallest_sample_that_reaches_it(
    samples: list[float], percent: float
) -> None:
    found = percentile(samples, percent)
    needed = len(samples) * percent / 100
    assert sum(s <= found for s in samples) >= needed
    assert all(sum(s <= other for s in samples) < needed for other in samples if other < found)


def test_a_percentile_needs_samples_and_a_percentage() -> None:
    with pytest.raises(ValueError, match="of 0 samples"):
        percentile([], 50)
    with pytest.raises(ValueError, match="percentile 101"):
        percentile([1.0], 101)


def test_a_spread_is_in_the_unit_asked_for() -> None:
    assert spread([1e-6, 2e-6, 3e-6]) == pytest.approx({"p50": 2, "p99": 3, "count": 3})
    assert spread([2.0], unit_s=1e-3)["p50"] == pytest.approx(2000)


def test_ratios_are_taken_within_a_round() -> None:
    assert median_ratio([1.0, 20.0, 3.0], [2.0, 20.0, 30.0]) == 0.5


def test_every_argument_is_timed_once() -> None:
    seen: list[int] = []
    assert all(s >= 0 for s in time_each(seen.append, range(5)))
    assert seen == [0, 1, 2, 3, 4]


def test_the_collector_runs_again_afterwards_also_after_an_error() -> None:
    with paused_gc():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), paused_gc():
        raise KeyError
    assert gc.isenabled()


def test_the_environment_is_json_and_names_the_machine() -> None:
    found = json.loads(json.dumps(environment()))
    assert found["cores"] >= 1
    assert found["cpu"]
    assert "numpy" in found["versions"]
