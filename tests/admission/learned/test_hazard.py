import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootcellar.admission.learned.hazard import (
    EDGES,
    WIDTHS,
    age_bucket,
    class_of,
    forget_a_little,
    refit,
    reuse_chance,
    use_class,
)
from rootcellar.admission.learned.records import AGES, NUM_CLASSES, Model, new_model

NEW = class_of(False, 1, 0, 7, 0.0)
AGAIN = class_of(False, 2, 0, 7, 5.0)
EVERY_GAP = [class_of(False, 2, 0, 7, gap) for gap in (0.0, 1.0, 5.0, 20.0, 100.0, 300.0)]


@given(st.floats(0, 1e7))
def test_an_age_lies_between_the_edges_of_its_bucket(age: float) -> None:
    bucket = age_bucket(age)
    assert bucket == 0 or EDGES[bucket] <= age
    assert bucket == AGES - 1 or age < EDGES[bucket + 1]


@given(
    st.booleans(), st.integers(1, 255), st.integers(0, 9), st.integers(0, 10**6), st.floats(0, 1e9)
)
def test_every_use_has_a_class(
    tail: bool, touches: int, turn: int, extension: int, gap: float
) -> None:
    assert 0 <= class_of(tail, touches, turn, extension, gap) < NUM_CLASSES


def test_what_tells_chunks_apart_is_in_the_class() -> None:
    base = (False, 1, 0, 3, 0.0)
    others = [
        (True, 1, 0, 3, 0.0),
        (False, 2, 0, 3, 0.0),
        (False, 1, 1, 3, 0.0),
        (False, 1, 0, 7, 0.0),
        (False, 1, 0, 3, 2.0),
    ]
    assert len({class_of(*use) for use in [base, *others]}) == 6


def test_the_worth_is_the_best_ratio_over_all_times_to_give_up() -> None:
    """The Gittins index, from its definition."""
    model = _learned()
    for klass in (NEW, AGAIN):
        hazard = model.hazard[klass]
        for start in range(AGES):
            ratios: list[float] = []
            unused, taken = 1.0, 0.0
            for age in range(start, AGES):
                taken += unused * WIDTHS[age] * (1 - hazard[age] / 2)
                unused *= 1 - hazard[age]
                ratios.append((1 - unused) / taken)
            assert model.worth[klass, start] == pytest.approx(max(ratios))


def test_a_class_that_is_used_again_is_worth_more() -> None:
    model = _learned()
    assert model.worth[AGAIN, 0] > 2 * model.worth[NEW, 0]


def test_a_class_without_a_past_is_taken_for_its_features() -> None:
    model = _learned()
    like_again, like_new = class_of(False, 2, 1, 7, 5.0), class_of(False, 1, 1, 7, 0.0)
    use_class(model, like_again)
    use_class(model, like_new)
    assert model.worth[like_again, 0] > 2 * model.worth[like_new, 0]


def test_heads_that_every_request_names_do_not_speak_for_what_is_new() -> None:
    model = new_model(8, 8)
    head, rare = class_of(False, 9, 0, 7, 1.0), class_of(False, 2, 0, 7, 300.0)
    for klass in (head, NEW, rare):
        use_class(model, klass)
    model.exposure[head, 0], model.events[head, 0] = 1000.0, 950.0
    model.exposure[NEW], model.events[NEW, 12] = 1000.0, 200.0
    refit(model)
    assert model.hazard[head, 0] > 0.8
    assert model.hazard[rare, 0] < 0.05


def test_before_anything_is_known_a_chunk_is_worth_no_more_for_being_young() -> None:
    model = new_model(8, 8)
    use_class(model, NEW)
    refit(model)
    assert model.worth[NEW, 0] == pytest.approx(model.worth[NEW, 5], rel=0.1)
    assert model.worth[NEW, AGES - 1] < 0.01 * model.worth[NEW, 0]


def test_a_gap_that_few_ages_are_known_of_has_its_own_level_at_the_others() -> None:
    model = new_model(8, 8)
    for klass in EVERY_GAP:
        use_class(model, klass)
    model.exposure[EVERY_GAP], model.events[EVERY_GAP] = 1000.0, 20.0
    eager, others = EVERY_GAP[-1], EVERY_GAP[:-1]
    model.exposure[eager, 11:], model.events[eager, 11:] = 0.0, 0.0
    model.events[eager, :11] = 200.0
    refit(model)
    assert model.hazard[eager, 12] > 2 * model.hazard[others, 12].max()


def test_an_age_that_none_has_reached_is_taken_for_the_one_before() -> None:
    model = new_model(8, 8)
    for klass in EVERY_GAP:
        use_class(model, klass)
    model.exposure[EVERY_GAP, :11], model.events[EVERY_GAP, :11] = 1000.0, 200.0
    refit(model)
    assert model.hazard[EVERY_GAP, 11] == pytest.approx(model.hazard[EVERY_GAP, 10], rel=0.2)


def test_the_chance_of_use_grows_with_the_horizon_and_shrinks_with_age() -> None:
    model = _learned()
    chances = [reuse_chance(model, AGAIN, 1.0, horizon) for horizon in range(AGES)]
    assert chances == sorted(chances)
    assert 0 < chances[0] < chances[-1] < 1
    assert reuse_chance(model, AGAIN, 1000.0, AGES - 1) < chances[-1]
    assert reuse_chance(model, AGAIN, 1000.0, 0) == 0  # it outlived the horizon


def test_old_counts_weigh_less() -> None:
    model = _learned()
    events = model.events[AGAIN].sum()
    forget_a_little(model)
    assert 0.9 * events < model.events[AGAIN].sum() < events


def _learned() -> Model:
    """NEW was used again once in a hundred, AGAIN nine times in ten, soon."""
    model = new_model(8, 8)
    use_class(model, NEW)
    use_class(model, AGAIN)
    model.exposure[[NEW, AGAIN]] = 1000.0 * np.linspace(1, 0.2, AGES)
    model.events[NEW, 3], model.events[AGAIN, :6] = 10.0, 150.0
    refit(model)
    return model
