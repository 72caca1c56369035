import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootcellar.bench.tune.loading import load_trace
from rootcellar.bench.tune.trace import Trace
from rootcellar.tiers import trace_recorder
from rootcellar.tiers.trace_file import header
from rootcellar.tiers.trace_recorder import TraceRecorder

CHAINS = st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=25)
"""Each as what its chunks hold; a chunk's key is of all that leads up to it."""


def keys(chain: list[int]) -> list[bytes]:
    return [bytes(chain[: stop + 1]).rjust(32, b"k") for stop in range(len(chain))]


def naive_ids(chains: list[list[int]]) -> list[int]:
    numbers: dict[bytes, int] = {}
    return [numbers.setdefault(key, len(numbers)) for chain in chains for key in keys(chain)]


def record(
    path: Path, chains: list[list[int]], first_s: float = 0.0, step_s: float = 0.25, **limits: int
) -> None:
    limits = {"max_bytes": 1 << 20, "chunk_tokens": 256} | limits
    recorder = TraceRecorder(path, **limits)
    for i, chain in enumerate(chains):
        recorder.record(keys(chain), first_s + i * step_s, 256 * len(chain) + 1)
    recorder.close()
    assert recorder.dropped == 0


def load(path: Path) -> Trace:
    trace = load_trace(path)
    trace.check_integrity()
    return trace


@given(CHAINS)
def test_equal_ids_mean_equal_keys(
    tmp_path_factory: pytest.TempPathFactory, chains: list[list[int]]
) -> None:
    path = tmp_path_factory.mktemp("day") / "trace"
    record(path, chains, first_s=1e6)
    trace = load(path)
    assert trace.ids.tolist() == naive_ids(chains)
    assert trace.offsets.tolist() == [sum(map(len, chains[:n])) for n in range(len(chains) + 1)]
    assert trace.times_s.tolist() == [i / 4 for i in range(len(chains))]
    assert trace.input_tokens.tolist() == [256 * len(chain) + 1 for chain in chains]
    assert (trace.name, trace.chunk_tokens) == ("trace", 256)


@given(CHAINS)
def test_what_is_forgotten_and_written_again_is_the_same_chunk(
    tmp_path_factory: pytest.TempPathFactory, chains: list[list[int]]
) -> None:
    path = tmp_path_factory.mktemp("day") / "trace"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_recorder, "MOST_KNOWN", 2)
        record(path, chains)
    assert load(path).ids.tolist() == naive_ids(chains)


def test_a_rotated_recording_is_one_trace_and_each_file_one_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    chains = [[n % 3, n % 7, n % 5] for n in range(60)]
    record(path, chains, max_bytes=10_000)
    before = path.with_name("trace.1")
    both, first = load(path), load(before)
    assert both.ids.tolist() == naive_ids(chains)
    assert both.times_s.tolist() == [i / 4 for i in range(60)]
    assert 0 < first.num_requests < 60
    assert first.ids.tolist() == naive_ids(chains[: first.num_requests])
    before.rename(tmp_path / "elsewhere")
    second = load(path)
    assert second.ids.tolist() == naive_ids(chains[first.num_requests :])
    path.rename(before)
    assert load(path).ids.tolist() == second.ids.tolist()


def test_requests_of_one_moment_stay_in_order_where_a_recording_was_rotated(
    tmp_path: Path,
) -> None:
    path = tmp_path / "trace"
    chains = [[n % 3, n % 7, n % 5] for n in range(60)]
    record(path, chains, step_s=0.0, max_bytes=10_000)
    assert path.with_name("trace.1").exists()
    assert load(path).ids.tolist() == naive_ids(chains)


def test_what_lies_beside_a_trace_and_is_no_recording_is_let_be(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    record(path, [[1]])
    path.with_name("trace.1").write_text("my notes")
    assert load(path).refs == 1


def test_runs_have_nothing_in_common_and_the_trace_says_so(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    for _ in range(2):
        record(path, [[1, 2], [1, 2]])
    trace = load(path)
    assert trace.ids.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    assert trace.times_s[2] >= trace.times_s[1] == 0.25
    assert any("2 runs" in note for note in trace.notes)


def test_a_hash_of_one_run_is_another_chunk_in_another_run(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(header(256, 1.0, "a") + line() + header(256, 2.0, "b") + line())
    assert load(path).ids.tolist() == [0, 1, 2, 3]


def test_runs_with_another_chunk_size_are_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    record(path, [[1], [2]])
    record(path, [[1], [1, 2]], chunk_tokens=64)
    trace = load(path)
    assert (trace.chunk_tokens, trace.ids.tolist()) == (64, [0, 0, 1])
    assert any("2 earlier requests are left out" in note for note in trace.notes)


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_torn_last_line_is_left_out(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "trace"
    record(path, [[1, 2], [1, 2, 0], [2, 1, 1]])
    path.write_bytes(path.read_bytes()[:-cut])
    trace = load(path)
    assert trace.ids.tolist() == [0, 1, 0, 1, 2]
    assert any("ends within a line" in note for note in trace.notes)


def line(**fields: Any) -> bytes:
    return json.dumps({"t": 1.0, "n": 10, "new": "00" * 16} | fields).encode() + b"\n"


@pytest.mark.parametrize(
    ("broken", "fault"),
    [
        (line(like=0, shared=3), "shared is 3, more than request 0 has"),
        (line(like=1, shared=1), "like is 1"),
        (line(like=-1, shared=1), "like is -1"),
        (line(new="00" * 9), "16 hex digits"),
        (line(new="x" * 16), "non-hexadecimal"),
        (line(n=None), "n is None"),
        (b'{"t": 1.0, "n": 5}\n', "new is missing"),
        (header(256, 1.0, "r").replace(b": 1,", b": 2,"), "recorded by a newer rootcellar"),
        (header(0, 1.0, "r"), "chunk_tokens is 0"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, broken: bytes, fault: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(header(256, 1.0, "r") + line() + broken + line())
    with pytest.raises(ValueError, match=f"line 3: .*{fault}"):
        load_trace(path)
