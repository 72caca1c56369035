from hypothesis import given
from hypothesis import strategies as st

from rootcellar.admission.base import Key
from rootcellar.admission.forest import Forest
from rootcellar.admission.testing import chain_of

paths = st.lists(st.integers(1, 3), min_size=1, max_size=4)


def test_a_parent_is_told_of_when_its_last_child_goes() -> None:
    forest, left, right = Forest(), chain_of(1, 2), chain_of(1, 3)
    for key, parent in ((left[0], None), (left[1], left[0]), (right[1], right[0])):
        assert forest.add(key, parent)
    assert forest.discard(left[1]) is None
    assert forest.discard(right[1]) == left[0]
    assert not forest.has_child(left[0])


def test_a_parent_that_is_elsewhere_is_told_of_too() -> None:
    forest, chain = Forest(), chain_of(1, 2)
    forest.add(chain[1], chain[0])
    assert chain[0] not in forest
    assert forest.has_child(chain[0])
    assert forest.discard(chain[1]) == chain[0]


def test_a_key_that_is_here_stays_where_it_hangs() -> None:
    forest, chain = Forest(), chain_of(1, 2)
    forest.add(chain[1], chain[0])
    assert not forest.add(chain[1], None)
    assert forest.parent(chain[1]) == chain[0]
    forest.check_integrity()


@given(st.lists(st.tuples(paths, st.booleans()), max_size=40))
def test_it_agrees_with_a_dictionary_of_parents(changes: list[tuple[list[int], bool]]) -> None:
    forest, parents = Forest(), dict[Key, Key | None]()
    for path, adds in changes:
        *above, key = chain_of(*path)
        parent = above[-1] if above else None
        if adds:
            forest.add(key, parent)
            parents[key] = parent
        elif key in forest:
            bared = forest.discard(key)
            del parents[key]
            assert bared == (None if parent in parents.values() else parent)
        forest.check_integrity()
        assert len(forest) == len(parents)
        for known in parents:
            assert forest.has_child(known) == (known in parents.values())
            siblings = list(parents.values()).count(parents[known])
            assert forest.is_only_child(known) == (parents[known] is not None and siblings == 1)
