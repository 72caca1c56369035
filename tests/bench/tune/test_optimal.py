from collections.abc import Iterator
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootcellar.bench.tune.curve import lru_curve
from rootcellar.bench.tune.lru import replay_lru
from rootcellar.bench.tune.optimal import replay_optimal
from rootcellar.bench.tune.trace import Trace

from .peers import kvcache_simulator_hits, libcachesim_belady_hits
from .small_traces import chains, mooncake, sessions_trace, trace_of, traces

NEVER = 2**62


def belady(trace: Trace, capacity: int) -> tuple[list[int], int]:
    """Hits by request and writes of Belady with bypass, reference by reference."""
    places: dict[int, list[int]] = {}
    for place, chunk in enumerate(trace.ids.tolist()):
        places.setdefault(chunk, []).append(place)
    uses = {chunk: iter([*of_chunk[1:], NEVER]) for chunk, of_chunk in places.items()}
    next_use: dict[int, int] = {}  # of what is resident
    hits: list[int] = []
    writes = 0
    for chain in chains(trace):
        hits.append(sum(chunk in next_use for chunk in chain))
        assert all(chunk in next_use for chunk in chain[: hits[-1]]), "a hole"
        for chunk in chain:
            was_resident = next_use.pop(chunk, None) is not None
            next_use[chunk] = next(uses[chunk])
            furthest = max(next_use, key=next_use.__getitem__)
            if next_use[chunk] == NEVER:
                furthest = chunk
            elif len(next_use) <= capacity:
                furthest = NEVER
            next_use.pop(furthest, None)
            writes += chunk in next_use and not was_resident
    return hits, writes


def most_hits(trace: Trace, capacity: int) -> int:
    """By trying everything: after each request, any of the chunks at hand may be kept."""
    best = {frozenset[int](): 0}
    for chain in chains(trace):
        after: dict[frozenset[int], int] = {}
        for resident, hits in best.items():
            found = hits + next((i for i, x in enumerate(chain) if x not in resident), len(chain))
            for kept in _subsets(resident | set(chain), capacity):
                after[kept] = max(after.get(kept, 0), found)
        best = after
    return max(best.values())


def _subsets(chunks: frozenset[int], capacity: int) -> Iterator[frozenset[int]]:
    for size in range(min(capacity, len(chunks)) + 1):
        yield from map(frozenset, combinations(chunks, size))


def test_what_is_used_again_last_gives_way() -> None:
    counts = replay_optimal(trace_of([[1], [2], [3], [2], [3], [1]]), 2)
    assert counts.hits.tolist() == [0, 0, 0, 1, 1, 0]
    assert counts.chunk_writes == 3


def test_what_never_comes_back_is_never_written() -> None:
    counts = replay_optimal(trace_of([[1, 2], [3], [1, 4]]), 10)
    assert counts.hits.tolist() == [0, 0, 1]
    assert counts.chunk_writes == 1


def test_a_chain_is_kept_from_its_head() -> None:
    counts = replay_optimal(trace_of([[1, 2, 3, 4], [1, 2, 3, 4]]), 3)
    assert counts.hits.tolist() == [0, 3]
    assert counts.chunk_writes == 3


def test_a_stretch_grows_together_with_the_one_that_hangs_below_it() -> None:
    counts = replay_optimal(trace_of([[1, 2, 3], [1, 9], [5], [1, 2, 3]]), 3)
    assert counts.hits.tolist() == [0, 1, 0, 3]


def test_a_tier_without_slots_holds_nothing_and_one_of_less_is_refused() -> None:
    counts = replay_optimal(trace_of([[1], [1]]), 0)
    assert counts.prefix_hits == counts.chunk_writes == 0
    with pytest.raises(ValueError, match="capacity_chunks is -1"):
        replay_optimal(trace_of([[1]]), -1)


def test_an_empty_trace_hits_nothing() -> None:
    assert replay_optimal(trace_of([]), 4).prefix_hits == 0


@given(traces(), st.integers(0, 20))
@settings(deadline=None)
def test_it_decides_like_belady_reference_by_reference(trace: Trace, capacity: int) -> None:
    counts = replay_optimal(trace, capacity)
    assert (counts.hits.tolist(), counts.chunk_writes) == belady(trace, capacity)


@given(traces(max_requests=6, max_length=3), st.integers(0, 3))
@settings(deadline=None)
def test_no_choice_of_what_to_keep_hits_more(trace: Trace, capacity: int) -> None:
    assert replay_optimal(trace, capacity).prefix_hits == most_hits(trace, capacity)


@given(traces())
@settings(deadline=None)
def test_it_is_never_below_lru_and_equal_when_everything_fits(trace: Trace) -> None:
    curve = lru_curve(trace)
    found = [replay_optimal(trace, capacity).prefix_hits for capacity in range(len(curve))]
    assert all(optimal >= lru for optimal, lru in zip(found, curve, strict=True))
    assert found == sorted(found)
    assert found[-1] == replay_lru(trace, trace.distinct).prefix_hits


@pytest.mark.parametrize("capacity", [1, 20, 300, 1000])
def test_reference_by_reference_it_is_the_same_on_long_sessions(capacity: int) -> None:
    trace = sessions_trace(capacity)
    counts = replay_optimal(trace, capacity)
    assert (counts.hits.tolist(), counts.chunk_writes) == belady(trace, capacity)


@pytest.mark.parametrize("capacity", [1, 20, 300, 1000])
def test_it_lies_between_libcachesims_belady_and_that_with_one_slot_more(capacity: int) -> None:
    """Without bypass, a missed chunk takes a slot that could have kept another; with one slot more
    it does no harm."""
    trace = sessions_trace(capacity)
    found = replay_optimal(trace, capacity).plain_hits
    assert libcachesim_belady_hits(trace, capacity) <= found
    assert found <= libcachesim_belady_hits(trace, capacity + 1)


@pytest.mark.parametrize("capacity", [1, 20, 300])
def test_kvcache_simulator_agrees(capacity: int) -> None:
    trace = sessions_trace(capacity)
    found = replay_optimal(trace, capacity).prefix_hits_last_half
    assert found == kvcache_simulator_hits(trace, capacity, optimal=True)


@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_both_agree_on_real_traffic(name: str) -> None:
    trace = mooncake(name)
    capacity = trace.distinct // 100
    counts = replay_optimal(trace, capacity)
    assert counts.prefix_hits_last_half == kvcache_simulator_hits(trace, capacity, optimal=True)
    assert libcachesim_belady_hits(trace, capacity) <= counts.plain_hits
    assert counts.plain_hits <= libcachesim_belady_hits(trace, capacity + 1)
