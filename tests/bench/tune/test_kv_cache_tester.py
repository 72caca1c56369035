import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootcellar.bench.tune.kv_cache_tester import SPREAD_S
from rootcellar.bench.tune.loading import load_trace
from rootcellar.bench.tune.trace import Trace


def request(t: float, *runs: int, out: int = 5) -> dict[str, Any]:
    num_tokens = 64 * sum(runs[1::2]) + 63
    return {"t": t, "type": "n", "in": num_tokens, "out": out, "hash_runs": list(runs)}


def session(*requests: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"block_size": 64, "hash_id_scope": "local", "requests": list(requests), **fields}


def load(path: Path, *sessions: dict[str, Any], seed: int = 0) -> Trace:
    path.write_text("".join(json.dumps(one) + "\n" for one in sessions))
    trace = load_trace(path, seed=seed)
    trace.check_integrity()
    return trace


def chains(trace: Trace) -> list[list[int]]:
    return [
        trace.ids[begin:end].tolist()
        for begin, end in zip(trace.offsets, trace.offsets[1:], strict=False)
    ]


def test_runs_are_spelled_out_and_folded_to_256_tokens(tmp_path: Path) -> None:
    trace = load(
        tmp_path / "t",
        session(
            request(0.0, 1, 9),
            request(2.0, 1, 8, 50, 4),
            request(3.0, 1, 7, 50, 5, 8, 1),
            request(9.5, 9, 3),
        ),
    )
    assert trace.chunk_tokens == 256
    assert chains(trace) == [[0, 1], [0, 1, 2], [0, 3, 4], []]
    assert trace.times_s.tolist() == [0, 2, 3, 9.5]
    assert trace.input_tokens.tolist() == [9 * 64 + 63, 12 * 64 + 63, 13 * 64 + 63, 3 * 64 + 63]
    assert trace.output_tokens.tolist() == [5] * 4
    assert any("4 blocks of 64 tokens are folded" in note for note in trace.notes)


def test_lists_of_ids_are_read_like_runs(tmp_path: Path) -> None:
    plain = request(0.0, 3, 8) | {"hash_ids": list(range(3, 11))}
    del plain["hash_runs"]
    trace = load(tmp_path / "t", session(plain, request(1.0, 3, 8)))
    assert chains(trace) == [[0, 1], [0, 1]]


def test_a_sub_agents_times_count_from_its_own_and_its_ids_are_the_sessions(
    tmp_path: Path,
) -> None:
    agent = {
        "t": 10.0,
        "type": "subagent",
        "requests": [request(0.0, 70, 4, out=1), request(5.0, 1, 8, out=2)],
    }
    nested = {"t": 4.0, "type": "subagent", "requests": [agent]}
    trace = load(tmp_path / "t", session(request(0.0, 1, 8), nested, request(16.0, 1, 4, out=3)))
    assert trace.times_s.tolist() == pytest.approx([0, 14, 16, 19])
    assert trace.output_tokens.tolist() == [5, 1, 3, 2]
    assert chains(trace) == [[0, 1], [2], [0], [0, 1]]


def test_ids_hold_in_their_session_unless_they_are_global(tmp_path: Path) -> None:
    one = session(request(0.0, 1, 4))
    assert load(tmp_path / "t", one, one).distinct == 2
    everywhere = session(request(0.0, 1, 4), hash_id_scope="global")
    assert load(tmp_path / "t", everywhere, everywhere).distinct == 1


def test_sessions_begin_where_the_seed_puts_them(tmp_path: Path) -> None:
    sessions = [session(request(0.0, 1, 4), request(1.0, 1, 4, out=n)) for n in range(40)]
    traces = [load(tmp_path / "t", *sessions, seed=seed) for seed in (0, 0, 1)]
    times = [trace.times_s.tolist() for trace in traces]
    assert times[0] == times[1] != times[2]
    assert SPREAD_S / 2 < times[0][-1] < SPREAD_S
    assert all("with seed 1" in note for note in traces[2].notes[:1])
    # Chunks are numbered as they arrive, not as the sessions lie in the file.
    assert traces[0].ids[0] == 0
    assert sorted(set(traces[0].ids.tolist())) == list(range(40))
    assert traces[0].output_tokens.tolist() != traces[2].output_tokens.tolist()


def test_a_directory_of_sessions_is_one_trace(tmp_path: Path) -> None:
    folder = tmp_path / "sessions"
    folder.mkdir()
    one, two = session(request(0.0, 1, 4)), session(request(0.0, 1, 8))
    both = load(tmp_path / "t", one, two)
    (folder / "a.json").write_text(json.dumps(one))
    (folder / "b.json").write_text(json.dumps(two))
    (folder / ".hidden").write_text("something else")
    trace = load_trace(folder)
    assert trace.name == "sessions"
    assert trace.ids.tolist() == both.ids.tolist()
    assert trace.times_s.tolist() == both.times_s.tolist()


RUNS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=4)


@given(st.lists(st.lists(RUNS, min_size=1, max_size=5), min_size=1, max_size=4), st.integers(0, 3))
def test_equal_ids_mean_equal_whole_prefixes(
    tmp_path_factory: pytest.TempPathFactory, sessions: list[list[Any]], seed: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "sessions.jsonl"
    made = [
        session(*(request(float(i), *sum(runs, ()), out=i) for i, runs in enumerate(one)))
        for one in sessions
    ]
    trace = load(path, *made, seed=seed)
    prefixes = sorted(
        prefix
        for number, one in enumerate(sessions)
        for runs in one
        for prefix in whole_prefixes(number, runs)
    )
    assert trace.refs == len(prefixes)
    assert trace.distinct == len(set(prefixes))
    counts = sorted(prefixes.count(prefix) for prefix in set(prefixes))
    assert sorted(trace.ids.tolist().count(i) for i in range(trace.distinct)) == counts


def whole_prefixes(number: int, runs: list[tuple[int, int]]) -> list[tuple[int, ...]]:
    ids = [first + step for first, length in runs for step in range(length)]
    return [(number, *ids[:stop]) for stop in range(4, len(ids) + 1, 4)]


@pytest.mark.parametrize(
    ("broken", "fault"),
    [
        (session(request(0.0, 1)), "hash_runs are no pairs"),
        (session(request(0.0, 1, 9) | {"in": 8}), "hash_runs are no pairs"),
        (session(request(0.0, 1, 2**63)), "must be a whole number"),
        (session(request(-1.0, 1, 4)), "t is -1.0"),
        (session({"t": 0.0, "in": 7, "out": 1}), "hash_ids is None"),
        (session({"t": 0.0, "in": 640, "out": 1, "hash_ids": [1.5]}), "hash_ids is "),
        (session({"t": 0.0, "requests": 3}), "requests is no list"),
        (session("x"), "a request is no JSON object"),  # type: ignore[arg-type] # broken on purpose
        (session(block_size=32), "block_size is 32, was 64 before"),
        (session(hash_id_scope="global"), "hash_id_scope is not that of the sessions before"),
        (session(hash_id_scope="mine"), 'must be "local" or "global"'),
    ],
)
def test_a_broken_session_is_named(tmp_path: Path, broken: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=rf"t, line 2: .*{fault}"):
        load(tmp_path / "t", session(request(0.0, 1, 4)), broken)
