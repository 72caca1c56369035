import pytest

from rootcellar.bench.device_budget import Budget, Part


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def take_rounds(part: Part, clock: Clock, at_most: int, *taken_s: float) -> int:
    """How many rounds there are if they take so long, the last of taken_s from then on."""
    number = -1
    for number in part.rounds(at_most):
        clock.now_s += taken_s[min(number, len(taken_s) - 1)]
    return number + 1


def test_parts_share_what_is_left_when_they_begin() -> None:
    clock = Clock()
    budget = Budget(100, {"first": 1, "second": 1, "third": 2}, clock=clock)
    assert budget.begin("first").left_s == 25
    clock.now_s += 10
    assert budget.begin("second").left_s == 30
    clock.now_s += 50
    assert budget.begin("third").left_s == 40


def test_a_part_that_took_too_long_leaves_the_others_less_but_never_below_nothing() -> None:
    clock = Clock()
    budget = Budget(100, {"first": 1, "second": 1}, clock=clock)
    budget.begin("first")
    clock.now_s += 130
    assert budget.begin("second").left_s == 0


def test_a_round_begins_only_if_one_like_the_slowest_fits() -> None:
    clock = Clock()
    part = Part(10, lambda fraction: None, clock)
    assert take_rounds(part, clock, 100, 2, 4, 1) == 3  # after 7 seconds, 4 more are too many


def test_the_first_round_is_measured_in_any_case() -> None:
    clock = Clock()
    assert take_rounds(Part(0, lambda fraction: None, clock), clock, 100, 5) == 1


def test_no_more_rounds_are_measured_than_asked_for() -> None:
    clock = Clock()
    assert take_rounds(Part(1000, lambda fraction: None, clock), clock, 3, 1) == 3


def test_progress_only_grows_and_ends_where_the_next_part_begins() -> None:
    clock, told = Clock(), list[tuple[int, int]]()
    budget = Budget(40, {"a": 1, "b": 3}, lambda done, total: told.append((done, total)), clock)
    for name, at_most in (("a", 4), ("b", 2)):
        part = budget.begin(name)
        take_rounds(part, clock, at_most, 1)
        part.end()
    done = [count for count, _ in told]
    assert done == sorted(done)
    assert (250, 1000) in told
    assert told[-1] == (1000, 1000)


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_budget_without_time_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        Budget(seconds, {"a": 1})
