"""Other people's simulators, asked the same questions. Both are installed for development, where
they can be: libcachesim has wheels for x86-64 Linux and not for every Python."""

from typing import Any

import pytest

from rootcellar.bench.tune.trace import Trace

from .small_traces import chains

NEVER = 2**62


def libcachesim_lru_hits(trace: Trace, capacity: int) -> int:
    """Chunks that are there when a request arrives, which then uses its chain from the tail."""
    peer: Any = pytest.importorskip("libcachesim")
    cache = peer.LRU(capacity, hashpower=16)
    hits = 0
    for chain in chains(trace):
        requests = [peer.Request(obj_id=chunk, obj_size=1) for chunk in chain]
        hits += sum(cache.find(request, update_cache=False) is not None for request in requests)
        for request in reversed(requests):
            cache.get(request)
    return hits


def libcachesim_belady_hits(trace: Trace, capacity: int) -> int:
    """On the stream of references, without bypass: what is missed always gets in."""
    peer: Any = pytest.importorskip("libcachesim")
    cache = peer.Belady(capacity, hashpower=16)
    stream = trace.ids.tolist()
    next_use: dict[int, int] = {}
    uses = [NEVER] * len(stream)
    for place in reversed(range(len(stream))):
        uses[place] = next_use.get(stream[place], NEVER)
        next_use[stream[place]] = place
    return sum(
        cache.get(peer.Request(obj_id=chunk, obj_size=1, next_access_vtime=uses[place]))
        for place, chunk in enumerate(stream)
    )


def kvcache_simulator_hits(trace: Trace, capacity: int, *, optimal: bool) -> int:
    """Of the last half of the requests. The tier must be full before that."""
    plans: Any = pytest.importorskip("kvcache_sim.plan")
    policies: Any = pytest.importorskip("kvcache_sim.policies")
    read: Any = pytest.importorskip("kvcache_sim.trace")
    data = read.TraceData(
        ids=trace.ids.tolist(),
        tokens=[1] * trace.refs,
        request_starts=trace.offsets.tolist(),
        block_size=1,
        request_count=trace.num_requests,
        unique_raw_blocks=trace.distinct,
        total_input_tokens=trace.refs,
        average_input_tokens=trace.refs / trace.num_requests,
        parse_errors=0,
        skipped_records=0,
    )
    result = policies.simulate_trie_policy(
        plans.build_execution_plan(data), capacity, optimal=optimal
    )
    assert result.measurementMode == "fixed_window", "the tier was not full by then"
    hit_tokens: int = result.hitTokens
    return hit_tokens
