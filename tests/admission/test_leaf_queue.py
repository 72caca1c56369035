from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from rootcellar.admission.base import Key
from rootcellar.admission.forest import Forest
from rootcellar.admission.leaf_queue import PATIENCE, LeafQueue
from rootcellar.admission.testing import chain_of


def key_of(number: int) -> Key:
    return number.to_bytes(32)


def make_queue(count: int) -> tuple[Forest, LeafQueue]:
    forest = Forest()
    queue = LeafQueue(forest)
    for number in range(count):
        forest.add(key_of(number), None)
        queue.push(key_of(number))
    return forest, queue


def take(forest: Forest, queue: LeafQueue, key: Key) -> None:
    parent = forest.discard(key)
    queue.remove(key)
    if parent is not None:
        queue.bare(parent)


def test_passing_over_a_key_does_not_make_it_younger() -> None:
    _, queue = make_queue(6)
    assert queue.oldest(lambda key: key < key_of(4)) == key_of(4)
    assert list(queue) == list(map(key_of, range(6)))
    assert queue.oldest(lambda key: False) == key_of(0)


def test_a_touched_key_is_the_youngest_also_after_it_was_passed_over() -> None:
    _, queue = make_queue(4)
    queue.oldest(lambda key: key < key_of(2))
    queue.touch([key_of(0), key_of(3)])
    assert list(queue) == list(map(key_of, [1, 2, 3, 0]))
    queue.check_integrity()


def test_a_parent_whose_turn_had_come_follows_its_last_child() -> None:
    forest, queue, chain = Forest(), None, chain_of(1, 2, 3)
    queue = LeafQueue(forest)
    for key, parent in zip([*chain, key_of(9)], [None, *chain[:2], None], strict=True):
        forest.add(key, parent)
        queue.push(key)  # a parent is the older here
    for key in reversed(chain):
        assert queue.oldest(lambda key: False) == key
        queue.check_integrity()
        take(forest, queue, key)
    assert queue.oldest(lambda key: False) == key_of(9)


def test_a_parent_whose_turn_had_come_is_older_than_all_that_waits() -> None:
    forest, queue = make_queue(2)
    parent, child, third = key_of(0), b"child", key_of(2)
    for key, above in ((child, parent), (third, None)):
        forest.add(key, above)
        queue.push(key)
    assert queue.oldest(lambda key: key in (child, key_of(1))) == third
    take(forest, queue, child)
    assert queue.oldest(lambda key: False) == parent


def test_who_was_passed_over_as_a_leaf_may_become_a_parent_and_a_leaf_again() -> None:
    forest, queue = make_queue(2)
    parent, other, child = key_of(0), key_of(1), b"child"
    assert queue.oldest(lambda key: key == parent) == other
    forest.add(child, parent)
    queue.push(child)
    assert queue.oldest(lambda key: False) == other
    queue.check_integrity()
    take(forest, queue, child)
    assert queue.oldest(lambda key: False) == parent
    queue.check_integrity()


def test_who_writes_down_and_who_evicts_do_not_walk_over_what_the_other_wants() -> None:
    """3000 keys, of which 600 are kept clean ahead of eviction, are all replaced."""
    count, target, asked = 3000, 600, 0
    forest, queue = make_queue(count)
    clean: set[Key] = set()
    ages = deque(map(key_of, range(count)))

    def is_clean(key: Key) -> bool:
        nonlocal asked
        asked += 1
        return key in clean

    def is_dirty(key: Key) -> bool:
        return not is_clean(key)

    for number in range(count, 2 * count):
        while len(clean) < target:
            candidate = queue.oldest(is_clean)
            assert candidate == ages[len(clean)]
            clean.add(ages[len(clean)])
        victim = ages.popleft()
        assert queue.oldest(is_dirty) == victim
        clean.discard(victim)
        take(forest, queue, victim)
        forest.add(key_of(number), None)
        queue.push(key_of(number))
        ages.append(key_of(number))
    assert asked < (2 * PATIENCE + 8) * count


@given(st.lists(st.tuples(st.integers(0, 9), st.sets(st.integers(0, 9))), max_size=30))
def test_of_keys_that_are_always_free_the_oldest_is_found(
    steps: list[tuple[int, set[int]]],
) -> None:
    """Whatever was passed over before: a caller that passes over nothing sees the true age."""
    _, queue = make_queue(10)
    ages = list(map(key_of, range(10)))
    for touched, busy in steps:
        queue.oldest(set(map(key_of, busy)).__contains__)
        queue.touch([key_of(touched)])
        ages.remove(key_of(touched))
        ages.append(key_of(touched))
        assert list(queue) == ages
        assert queue.oldest(lambda key: False) == ages[0]
        queue.check_integrity()
