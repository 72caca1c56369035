import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootcellar.admission.base import Key
from rootcellar.admission.count_min import CountMinSketch


def key_of(number: int) -> Key:
    return number.to_bytes(32)


numbers = st.lists(st.sets(st.integers(0, 50), max_size=12), max_size=30)


@given(numbers, st.integers(1, 255))
def test_no_key_is_counted_too_low_before_the_first_halving(
    requests: list[set[int]], most: int
) -> None:
    sketch, exact = CountMinSketch(64, most=most), Counter[Key]()
    for request in requests:
        keys = list(map(key_of, request))
        sketch.add(keys)
        exact.update(keys)
    keys = list(map(key_of, range(60)))
    assert sketch.halvings == 0
    for key, counted in zip(keys, sketch.counts(keys), strict=True):
        assert counted >= min(exact[key], most)


@pytest.mark.parametrize("seed", range(3))
def test_who_shares_a_counter_with_a_hotter_key_does_not_lower_it(seed: int) -> None:
    rng = random.Random(seed)
    keys = [rng.randbytes(32) for _ in range(190)]
    sketch, hot = CountMinSketch(200), keys[:20]
    for _ in range(5):
        sketch.add(hot)
    sketch.add(keys)
    assert (sketch.counts(hot) >= 6).all()


@pytest.mark.parametrize("seed", range(5))
def test_few_keys_are_counted_too_high_in_a_full_sketch(seed: int) -> None:
    rng, entries = random.Random(seed), 10_000
    sketch, exact = CountMinSketch(entries), Counter[Key]()
    for _ in range(2_000):
        keys = [key_of(rng.getrandbits(200) % 9_900) for _ in range(20)]
        keys = list(dict.fromkeys(keys))
        sketch.add(keys)
        exact.update(keys)
    assert sketch.halvings == 0
    seen = list(exact)
    expected = [min(exact[key], 15) for key in seen]
    assert sum(sketch.counts(seen) > expected) < 0.01 * len(seen)
    unseen = [rng.randbytes(32) for _ in range(10_000)]
    assert sum(sketch.counts(unseen) > 0) < 0.01 * len(unseen)


def test_halving_forgets_who_was_seen_once_and_keeps_who_was_seen_often() -> None:
    sketch, hot = CountMinSketch(100), [key_of(number) for number in range(10)]
    for _ in range(8):
        sketch.add(hot)
    once = [key_of(number) for number in range(1000, 1090)]
    sketch.add(once)
    assert sketch.counts(once).all()
    sketch.add([key_of(2000)])
    assert sketch.halvings == 1
    assert list(sketch.counts(hot)) == [4] * 10
    assert not sketch.counts(once).any()


def test_seeing_the_same_keys_again_and_again_halves_nothing() -> None:
    sketch, keys = CountMinSketch(100), [key_of(number) for number in range(90)]
    for _ in range(1000):
        sketch.add(keys)
    assert sketch.halvings == 0
    assert (sketch.counts(keys) == 15).all()


def test_there_is_room_for_half_the_keys_after_halving_whatever_was_hot() -> None:
    sketch, keys = CountMinSketch(100), [key_of(number) for number in range(100)]
    for _ in range(20):
        sketch.add(keys[:99])
    sketch.add(keys)
    sketch.add([key_of(100)])
    assert sketch.halvings == 4
    assert not sketch.counts(keys).any()
    assert list(sketch.counts([key_of(100)])) == [1]


def test_keys_that_are_no_hashes_of_32_bytes_are_told_apart_too() -> None:
    sketch = CountMinSketch(100)
    sketch.add([b"", b"a", b"b" * 100])
    assert list(sketch.counts([b"", b"a", b"b" * 100, b"b" * 99])) == [1, 1, 1, 0]


def test_nothing_is_seen_and_nothing_asked() -> None:
    sketch = CountMinSketch(1)
    sketch.add([])
    assert len(sketch.counts([])) == 0


def test_what_was_saved_is_counted_on() -> None:
    first, second = CountMinSketch(64), CountMinSketch(64)
    first.add([key_of(1)])
    assert second.restore(first.save())
    second.add([key_of(1)])
    assert list(second.counts([key_of(1)])) == [2]


def test_a_save_of_another_size_or_with_impossible_counts_changes_nothing() -> None:
    sketch, larger = CountMinSketch(64), CountMinSketch(10_000)
    higher = CountMinSketch(64, most=255)
    for _ in range(16):
        higher.add([key_of(2)])
    sketch.add([key_of(1)])
    saved = higher.save()
    cut = CountMinSketch(64).save()[:-2]
    for data in (larger.save(), saved, cut, b"", b"garbage"):
        assert not sketch.restore(data)
        assert list(sketch.counts([key_of(1), key_of(2)])) == [1, 0]


@pytest.mark.parametrize("field", ["entries", "most"])
def test_a_zero_is_refused_by_name(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is 0"):
        CountMinSketch(**{"entries": 1, field: 0})
