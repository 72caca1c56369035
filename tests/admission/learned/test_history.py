from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootcellar.admission.learned.hazard import EDGES, age_bucket
from rootcellar.admission.learned.history import TIMED, became_ghost, observe
from rootcellar.admission.learned.records import AGES, NONE, Model, Rows, new_model

GAPS_S = 2.0
chains = st.lists(st.integers(0, 3), min_size=1, max_size=5)


def rows_of(path: list[int]) -> Rows:
    """Rows of a forest with four branches everywhere: equal heads have equal rows."""
    rows, row = list[int](), 0
    for branch in path:
        row = 4 * row + branch + 1
        rows.append(row)
    return np.array(rows, np.int32)


def make_model(most_ghosts: int = 10_000) -> Model:
    return new_model(4**6, most_ghosts)


@settings(max_examples=60, deadline=None)
@given(st.lists(chains, max_size=80))
def test_events_and_exposure_are_those_of_a_naive_count(paths: list[list[int]]) -> None:
    """Of every sample, each age bucket that it reached unused, and the one in which it was used."""
    model = make_model()
    samples: dict[int, tuple[float, float, int]] = {}  # by row: time, weight, class
    events, exposure = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for number, path in enumerate(paths[:120]):
        rows = rows_of(path)
        observe(model, rows, number * GAPS_S)
        now = float(model.now[0]["clock"])
        for row in rows.tolist():
            if row in samples:
                time, weight, klass = samples.pop(row)
                events[klass, age_bucket(now - time)] += weight  # type: ignore[assignment]
                _expose(exposure, time, weight, klass, now)
        for row in rows.tolist():
            chunk = model.chunks[row]
            if chunk["entry"] != NONE:
                sample = model.log[chunk["entry"]]
                samples[row] = (now, float(sample["weight"]), int(chunk["klass"]))
    clock = float(model.now[0]["clock"])
    for time, weight, klass in samples.values():
        _expose(exposure, time, weight, klass, clock)
    for table, counted in ((model.events, events), (model.exposure, exposure)):
        found = {(k, a): table[k, a] for k, a in zip(*np.nonzero(table), strict=True)}
        assert found == pytest.approx(dict(counted), rel=1e-6)


def test_a_run_of_one_class_is_one_sample_at_its_deepest_chunk() -> None:
    model = make_model()
    rows = rows_of([0, 0, 0, 0, 0])
    observe(model, rows, 0.0)
    sampled = [bool(model.chunks[row]["entry"] != NONE) for row in rows]
    assert sampled == [False, False, False, True, True]  # the tail is a class of its own
    assert model.log["weight"][:2].tolist() == pytest.approx([1.0, 2.0])


def test_a_chain_that_grows_has_turns() -> None:
    model = make_model()
    for turn in range(3):
        observe(model, rows_of([0] * (2 * turn + 1)), float(turn))
    assert model.chunks["turn"][rows_of([0] * 5)].tolist() == [0, 1, 1, 2, 2]
    assert model.chunks["touches"][rows_of([0] * 5)].tolist() == [3, 2, 2, 1, 1]


def test_ghosts_are_bounded_and_the_oldest_is_forgotten() -> None:
    model = make_model(most_ghosts=3)
    observe(model, rows_of([0, 0]), 0.0)
    observe(model, rows_of([1, 1]), 1.0)
    tracked = model.chunks["tracked"]
    assert tracked[rows_of([1, 1])].all()
    assert tracked[rows_of([0, 0])].tolist() == [1, 0]  # a tail goes before its head
    assert model.now[0]["ghosts"] == 3
    forgotten = model.forgotten[: model.now[0]["forgotten"]].tolist()
    assert forgotten == rows_of([0, 0])[1:].tolist()


def test_a_chunk_in_a_tier_is_no_ghost() -> None:
    model = make_model(most_ghosts=2)
    model.chunks["places"][1] = 1
    observe(model, rows_of([0]), 0.0)
    assert model.now[0]["ghosts"] == 0
    model.chunks["places"][1] = 0
    became_ghost(model, 1)
    assert model.now[0]["ghosts"] == 1


def test_the_clock_counts_requests_until_it_knows_their_pace() -> None:
    model = make_model()
    for number in range(20):
        observe(model, rows_of([0]), 100.0 * number)
    assert model.now[0]["clock"] == 20


def test_the_clock_goes_on_when_traffic_stops() -> None:
    model = make_model()
    for number in range(200):
        observe(model, rows_of([0]), GAPS_S * number)
    before = float(model.now[0]["clock"])
    observe(model, rows_of([0]), GAPS_S * 199 + 3600.0)
    assert model.now[0]["clock"] - before == pytest.approx(1 - TIMED + TIMED * 1800, rel=0.01)


def test_requests_without_times_count_as_requests() -> None:
    model = make_model()
    for _ in range(200):
        observe(model, rows_of([0]), 0.0)
    assert model.now[0]["clock"] == 200


def test_a_clock_that_runs_backwards_does_no_harm() -> None:
    model = make_model()
    for number in range(100):
        observe(model, rows_of([0]), -float(number))
    assert np.isfinite(model.worth).all()
    assert model.now[0]["clock"] == 100


def _expose(
    exposure: Counter[tuple[int, int]], time: float, weight: float, klass: int, now: float
) -> None:
    for age in range(AGES):
        if now - time >= EDGES[age]:
            exposure[klass, age] += weight  # type: ignore[assignment]
