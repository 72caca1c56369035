import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootcellar.admission.lru import LruOrder
from rootcellar.bench.tune.lru import replay_lru
from rootcellar.bench.tune.trace import Trace

from .peers import kvcache_simulator_hits, libcachesim_lru_hits
from .small_traces import chains, mooncake, sessions_trace, trace_of, traces


def live_lru(trace: Trace, capacity: int) -> tuple[list[int], int, int]:
    """Hits by request, plain hits and writes of a tier that evicts by the order of live stores."""
    order = LruOrder()
    hits: list[int] = []
    plain = writes = 0
    for numbers in chains(trace):
        chain = [number.to_bytes(4) for number in numbers]
        resident = [key in order for key in chain]
        plain += sum(resident)
        stop = resident.index(False) if False in resident else len(chain)
        hits.append(stop)
        order.touch(chain, stop)
        while stop < len(chain) and _made_room(order, capacity, set(chain)):
            order.add(chain[stop], chain[stop - 1] if stop else None)
            writes += 1
            stop += 1
        order.touch(chain, stop)
    return hits, plain, writes


def _made_room(order: LruOrder, capacity: int, busy: set[bytes]) -> bool:
    if len(order) < capacity:
        return True
    victim = order.victim(busy.__contains__)
    if victim is not None:
        order.discard(victim)
    return victim is not None


def test_hits_are_counted_before_the_request_changes_anything() -> None:
    counts = replay_lru(trace_of([[1, 2], [1, 2], [3], [1, 2]]), 2)
    assert counts.hits.tolist() == [0, 2, 0, 1]
    assert counts.chunk_writes == 2 + 1 + 1
    assert counts.prefix_hits == counts.plain_hits == 3


def test_the_last_half_begins_in_the_middle_of_the_requests() -> None:
    counts = replay_lru(trace_of([[1], [1], [1], [1], [1]]), 1)
    assert counts.prefix_hits == 4
    assert counts.prefix_hits_last_half == 3


def test_of_a_request_longer_than_the_tier_only_the_head_gets_in() -> None:
    counts = replay_lru(trace_of([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]), 3)
    assert counts.hits.tolist() == [0, 3]
    assert counts.chunk_writes == 3


def test_a_tier_without_slots_holds_nothing_and_one_of_less_is_refused() -> None:
    counts = replay_lru(trace_of([[1], [1]]), 0)
    assert counts.prefix_hits == counts.chunk_writes == 0
    with pytest.raises(ValueError, match="capacity_chunks is -1"):
        replay_lru(trace_of([[1]]), -1)


def test_an_empty_trace_hits_nothing() -> None:
    assert replay_lru(trace_of([]), 4).prefix_hits == 0


@given(traces(), st.integers(0, 20))
@settings(deadline=None)
def test_it_decides_like_the_order_that_live_tiers_run(trace: Trace, capacity: int) -> None:
    counts = replay_lru(trace, capacity)
    hits, plain, writes = live_lru(trace, capacity)
    assert counts.hits.dtype == np.int32
    assert counts.hits.tolist() == hits
    assert (counts.plain_hits, counts.chunk_writes) == (plain, writes)


@pytest.mark.parametrize("capacity", [1, 20, 300, 1500])
def test_libcachesim_agrees(capacity: int) -> None:
    trace = sessions_trace(capacity)
    assert replay_lru(trace, capacity).plain_hits == libcachesim_lru_hits(trace, capacity)


@pytest.mark.parametrize("capacity", [150, 300, 600])
def test_kvcache_simulator_agrees_where_every_request_fits(capacity: int) -> None:
    """It evicts what a longer request has just brought in itself."""
    trace = sessions_trace(capacity)
    assert np.diff(trace.offsets).max() <= capacity
    found = replay_lru(trace, capacity).prefix_hits_last_half
    assert found == kvcache_simulator_hits(trace, capacity, optimal=False)


@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_both_agree_on_real_traffic(name: str) -> None:
    trace = mooncake(name)
    capacity = trace.distinct // 20
    counts = replay_lru(trace, capacity)
    assert counts.plain_hits == libcachesim_lru_hits(trace, capacity)
    assert counts.prefix_hits_last_half == kvcache_simulator_hits(trace, capacity, optimal=False)
