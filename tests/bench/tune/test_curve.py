import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootcellar.bench.tune.curve import knee, lru_curve, slope_past
from rootcellar.bench.tune.lru import replay_lru
from rootcellar.bench.tune.trace import Trace

from .small_traces import mooncake, sessions_trace, trace_of, traces


def test_a_chain_hits_as_far_as_it_fits() -> None:
    assert lru_curve(trace_of([[1, 2, 3], [1, 2, 3]])).tolist() == [0, 1, 2, 3]


def test_what_was_used_between_pushes_a_chain_down() -> None:
    assert lru_curve(trace_of([[1, 2], [5, 6], [1, 2]])).tolist() == [0, 0, 0, 1, 2]


def test_an_empty_trace_has_one_capacity() -> None:
    curve = lru_curve(trace_of([]))
    assert curve.tolist() == [0]
    assert knee(curve) == slope_past(curve, 0) == 0


@given(traces())
@settings(deadline=None)
def test_it_is_what_a_replay_finds_at_every_capacity(trace: Trace) -> None:
    curve = lru_curve(trace)
    assert curve.dtype == np.int64
    replayed = [replay_lru(trace, capacity).prefix_hits for capacity in range(trace.distinct + 1)]
    assert curve.tolist() == replayed


@pytest.mark.parametrize("seed", range(3))
def test_it_is_what_a_replay_finds_on_long_sessions(seed: int) -> None:
    trace = sessions_trace(seed)
    curve = lru_curve(trace)
    for capacity in range(0, len(curve), 17):
        assert curve[capacity] == replay_lru(trace, capacity).prefix_hits


@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_it_is_what_a_replay_finds_on_real_traffic(name: str) -> None:
    trace = mooncake(name)
    curve = lru_curve(trace)
    for percent in (1, 2, 5, 10, 20, 50, 100):
        capacity = trace.distinct * percent // 100
        assert curve[capacity] == replay_lru(trace, capacity).prefix_hits


@given(traces(), st.floats(0, 1))
@settings(deadline=None)
def test_the_knee_is_the_smallest_capacity_that_reaches_the_share(
    trace: Trace, share: float
) -> None:
    curve = lru_curve(trace)
    found = knee(curve, share)
    assert curve[found] >= share * curve[-1]
    assert not (curve[:found] >= share * curve[-1]).any()


def test_the_slope_is_what_twice_the_capacity_adds() -> None:
    curve = np.array([0, 5, 8, 9, 10])
    assert [slope_past(curve, capacity) for capacity in range(6)] == [0, 3, 2, 1, 0, 0]
