import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootcellar.admission.ghost import GhostHistory
from rootcellar.admission.testing import chain_of


def test_the_oldest_is_forgotten_first() -> None:
    ghost, keys = GhostHistory(2), [chain_of(number)[0] for number in range(3)]
    for key in keys:
        ghost.remember(key)
    assert [key in ghost for key in keys] == [False, True, True]
    ghost.remember(keys[1])
    ghost.forget_oldest()
    assert [key in ghost for key in keys] == [False, True, False]


def test_who_comes_back_is_no_ghost() -> None:
    ghost, key = GhostHistory(1), chain_of(1)[0]
    ghost.remember(key)
    ghost.discard(key)
    ghost.discard(key)
    assert len(ghost) == 0


def test_a_smaller_limit_holds_from_the_next_trim_on() -> None:
    ghost, chain = GhostHistory(3), chain_of(1, 2, 3)
    for key in reversed(chain):
        ghost.remember(key)
    ghost.limit = 1
    ghost.trim()
    assert chain[0] in ghost
    assert len(ghost) == 1


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="limit is -1"):
        GhostHistory(-1)


@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=5), max_size=40))
def test_it_is_bounded_and_forgets_tails_before_heads(requests: list[list[int]]) -> None:
    ghost = GhostHistory(6)
    for path in requests:
        for key in reversed(chain_of(*path)):
            ghost.remember(key)
        assert len(ghost) <= 6
    for path in requests:
        known = [key in ghost for key in chain_of(*path)]
        assert known == sorted(known, reverse=True)
