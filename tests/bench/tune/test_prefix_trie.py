import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rootcellar.bench.tune.pair_table import PairTable, find
from rootcellar.bench.tune.prefix_trie import PrefixTrie

IDS = st.integers(0, 3) | st.integers(2**64 - 3, 2**64 - 1)
REQUESTS = st.lists(st.tuples(st.integers(0, 2), st.lists(IDS, max_size=9)), max_size=12)
Request = tuple[int, list[int]]


def named(trie: PrefixTrie, requests: list[Request], roots: list[int], step: int) -> list[int]:
    lengths = np.array([len(ids) for _, ids in requests], np.int64)
    scopes = np.array([roots[scope] for scope, _ in requests], np.int64)
    ids = np.array([one for _, ids in requests for one in ids], np.uint64)
    return [int(number) for number in trie.chunks(scopes, ids, lengths, lengths // step)]


def naively_named(requests: list[Request], step: int) -> list[int]:
    """Whole prefixes, written out."""
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    out = []
    for scope, ids in requests:
        for stop in range(step, len(ids) + 1, step):
            out.append(numbers.setdefault((scope, tuple(ids[:stop])), len(numbers)))
    return out


@given(st.lists(REQUESTS, max_size=4), st.integers(1, 3))
def test_chunks_are_numbered_as_their_whole_prefixes_are(
    batches: list[list[Request]], step: int
) -> None:
    trie = PrefixTrie(step)
    roots = [trie.new_scope() for _ in range(3)]
    out = [number for batch in batches for number in named(trie, batch, roots, step)]
    assert out == naively_named([request for batch in batches for request in batch], step)
    assert trie.num_chunks == len(set(out))


def test_it_outgrows_its_first_room_many_times() -> None:
    rng = np.random.default_rng(1)
    batches: list[list[Request]] = [
        [(0, [int(one) for one in rng.integers(0, 40, 4)]) for _ in range(2000)] for _ in range(3)
    ]
    trie = PrefixTrie(1)
    roots = [trie.new_scope()]
    out = [number for batch in batches for number in named(trie, batch, roots, 1)]
    assert out == naively_named([request for batch in batches for request in batch], 1)


@given(st.lists(st.tuples(st.integers(-3, 3), IDS), max_size=40, unique=True))
def test_a_pair_is_found_where_it_was_put_after_the_table_grew(
    pairs: list[tuple[int, int]],
) -> None:
    table = PairTable()
    for value, (left, right) in enumerate(pairs, 1):
        table.reserve(1000 * value)
        lefts, rights, values = table.columns
        slot = find(table.columns, left, np.uint64(right))
        assert values[slot] == 0
        lefts[slot], rights[slot], values[slot] = left, right, value
        table.size += 1
    for value, (left, right) in enumerate(pairs, 1):
        assert table.columns[2][find(table.columns, left, np.uint64(right))] == value
