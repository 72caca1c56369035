"""Traces made by hand and at random, and the real ones where they lie beside the checkout."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest

from rootcellar.bench.tune.trace import Trace

MOONCAKE = Path(__file__).parents[4] / "shared" / "traces" / "mooncake"


def trace_of(paths: Sequence[Sequence[int]]) -> Trace:
    """One request per path of branch numbers; equal leading numbers are equal chunks."""
    nodes: dict[tuple[int, int], int] = {}
    ids: list[int] = []
    offsets = [0]
    for path in paths:
        node = -1
        for branch in path:
            node = nodes.setdefault((node, branch), len(nodes))
            ids.append(node)
        offsets.append(len(ids))
    nothing = np.zeros(len(paths), np.int64)
    return Trace(
        name="by hand",
        ids=np.array(ids, np.int32),
        offsets=np.array(offsets, np.int64),
        times_s=np.arange(len(paths), dtype=np.float64),
        input_tokens=nothing,
        output_tokens=nothing,
        chunk_tokens=256,
    )


def chains(trace: Trace) -> list[list[int]]:
    """The ids of each request."""
    return [part.tolist() for part in np.split(trace.ids, trace.offsets[1:-1])]


def traces(*, max_requests: int = 30, max_length: int = 8) -> st.SearchStrategy[Trace]:
    paths = st.lists(st.integers(0, 2), max_size=max_length)
    return st.lists(paths, min_size=1, max_size=max_requests).map(trace_of)


def sessions_trace(seed: int, *, num_sessions: int = 30, num_requests: int = 600) -> Trace:
    """Sessions that share a head, grow with every request, and now and then start anew."""
    rng = random.Random(seed)
    paths: list[list[int]] = [[] for _ in range(num_sessions)]
    requests: list[list[int]] = []
    for number in range(num_requests):
        session = min(int(rng.expovariate(4 / num_sessions)), num_sessions - 1)
        if not paths[session] or rng.random() < 0.1:
            paths[session] = [0, 1, 2 + rng.randrange(3)]
        paths[session] += [10 + number] * rng.randint(1, 6)
        requests.append(list(paths[session]))
    return trace_of(requests)


def mooncake(name: str) -> Trace:
    path = MOONCAKE / f"{name}_first_half.jsonl"
    if not path.exists():
        pytest.skip("the public traces do not lie beside this checkout")
    with path.open() as lines:
        return trace_of([json.loads(line)["hash_ids"] for line in lines])
