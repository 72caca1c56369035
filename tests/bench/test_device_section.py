import pytest

from rootcellar.bench.device_section import Bound, Target, Verdict, compared, quotients


@pytest.mark.parametrize(
    ("measured", "bound", "verdict"),
    [
        (0.8, Bound.AT_LEAST, Verdict.MET),
        (0.79, Bound.AT_LEAST, Verdict.MISSED),
        (0.8, Bound.AT_MOST, Verdict.MET),
        (0.81, Bound.AT_MOST, Verdict.MISSED),
        (float("nan"), Bound.AT_LEAST, Verdict.MISSED),
        (float("nan"), Bound.AT_MOST, Verdict.MISSED),
    ],
)
def test_a_target_is_met_on_its_side_of_the_limit(
    measured: float, bound: Bound, verdict: Verdict
) -> None:
    target = Target("speed", measured, bound, 0.8)
    assert target.verdict(dry_run=False) is verdict
    assert target.verdict(dry_run=True) is Verdict.NOT_JUDGED


def test_speeds_are_compared_with_the_yardstick_of_their_own_round() -> None:
    drifting = quotients([2.0, 4.0, 8.0], [1.0, 2.0, 6.0])
    assert drifting == [0.5, 0.5, 0.75]
    assert compared("to_copy", drifting) == {
        "to_copy": 0.5,
        "to_copy_min": 0.5,
        "to_copy_max": 0.75,
        "rounds": 3,
    }


def test_a_missing_round_is_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        quotients([1.0, 2.0], [1.0])
