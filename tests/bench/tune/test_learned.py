from hashlib import sha256
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootcellar.admission.learned.policy import Learned
from rootcellar.bench.tune.learned import replay_learned
from rootcellar.bench.tune.replay import Replay
from rootcellar.bench.tune.trace import Trace

from .small_traces import trace_of

paths = st.lists(st.integers(0, 2), min_size=1, max_size=9)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(paths, min_size=1, max_size=120), st.integers(1, 25), st.sampled_from([0, 1, 7, 40])
)
def test_the_compiled_journey_is_that_of_the_objects(
    requests: list[list[int]], dram_chunks: int, nvme_chunks: int
) -> None:
    _compare(trace_of(requests), dram_chunks, nvme_chunks)


@pytest.mark.parametrize(("dram_chunks", "nvme_chunks"), [(40, 0), (40, 120), (90, 30), (300, 0)])
def test_they_agree_on_traffic_that_teaches_something(dram_chunks: int, nvme_chunks: int) -> None:
    """Conversations that grow, some that do not come back, and refits in between."""
    rng = np.random.default_rng(5)
    talks = [[int(branch)] for branch in rng.integers(0, 3, 60)]
    requests = list[list[int]]()
    for _ in range(700):
        talk = int(rng.integers(0, len(talks)))
        talks[talk] = (talks[talk] + rng.integers(0, 3, int(rng.integers(0, 5))).tolist())[:40]
        requests.append(talks[talk])
        if rng.random() < 0.1:
            talks[talk] = [int(rng.integers(0, 3))]
    _compare(trace_of(requests), dram_chunks, nvme_chunks)


def _compare(trace: Trace, dram_chunks: int, nvme_chunks: int) -> None:
    compiled = replay_learned(trace, dram_chunks, nvme_chunks, lambda done, total: None)
    replay = Replay(Learned(), dram_chunks, nvme_chunks)
    keys = [sha256(bytes([n % 256, n // 256])).digest() for n in range(trace.distinct)]
    for request, (start, stop) in enumerate(pairwise(trace.offsets.tolist())):
        chain = [keys[chunk] for chunk in trace.ids[start:stop].tolist()]
        found = replay.request(chain, float(trace.times_s[request]))
        assert found.dram == compiled.dram_hits[request], request
        assert found.nvme == compiled.nvme_hits[request], request
    assert replay.chunk_writes == compiled.chunk_writes
    assert replay.nvme_chunk_writes == compiled.nvme_chunk_writes
    assert replay.promotions == compiled.promotions
    assert replay.wasted_promotions == compiled.wasted_promotions
    assert dict(replay.refusals) == compiled.refusals
