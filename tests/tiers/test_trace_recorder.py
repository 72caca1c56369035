import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from rootcellar.tiers import trace_recorder
from rootcellar.tiers.trace_recorder import TraceRecorder

KEYS = [sha256(bytes([n])).digest() for n in range(200)]


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[TraceRecorder]:
    made = TraceRecorder(tmp_path / "trace", max_bytes=1 << 20, chunk_tokens=256)
    yield made
    made.close()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_request_costs_its_new_chunks_only(tmp_path: Path, recorder: TraceRecorder) -> None:
    recorder.record(KEYS[:40], 7.0, 10_300)
    recorder.record(KEYS[:42], 8.5, 10_900)
    recorder.record(KEYS[:42], 8.75, 10_900)
    recorder.record([*KEYS[:41], KEYS[99]], 9.0, 10_950)
    recorder.record([], 10.0, 3)
    recorder.close()
    first, *requests = lines(tmp_path / "trace")
    assert (first["format"], first["version"], first["chunk_tokens"]) == (
        "rootcellar-trace",
        1,
        256,
    )
    news = [request.pop("new") for request in requests]
    assert [len(new) // 16 for new in news] == [40, 2, 0, 1, 0]
    assert requests == [
        {"t": 0.0, "n": 10_300},
        {"t": 1.5, "n": 10_900, "like": 0, "shared": 40},
        {"t": 1.75, "n": 10_900, "like": 1, "shared": 42},
        {"t": 2.0, "n": 10_950, "like": 1, "shared": 41},
        {"t": 3.0, "n": 3},
    ]


def test_hashes_tell_nothing_about_keys_nor_about_other_recordings(tmp_path: Path) -> None:
    texts = []
    for name in ("a", "b"):
        recorder = TraceRecorder(tmp_path / name, max_bytes=1 << 20, chunk_tokens=256)
        recorder.record(KEYS[:100], 0.0, 1)
        recorder.close()
        texts.append(lines(tmp_path / name)[1]["new"])
    hashes = [{text[i : i + 16] for i in range(0, 1600, 16)} for text in texts]
    assert [len(one) for one in hashes] == [100, 100]
    assert not hashes[0] & hashes[1]
    assert not any(key.hex()[:16] in one for key in KEYS for one in hashes)


def test_a_chain_that_changes_after_it_was_recorded_is_recorded_as_it_was(
    tmp_path: Path, recorder: TraceRecorder
) -> None:
    chain = KEYS[:2]
    recorder.record(chain, 0.0, 1)
    chain.clear()
    recorder.close()
    assert len(lines(tmp_path / "trace")[1]["new"]) == 32


def test_it_is_written_while_the_recorder_is_open(tmp_path: Path, recorder: TraceRecorder) -> None:
    recorder.record(KEYS, 0.0, 1)
    waiting = threading.Event()
    while b'"new"' not in (tmp_path / "trace").read_bytes():
        waiting.wait(0.01)
    assert recorder.dropped == 0


def test_a_full_queue_drops_and_counts(
    tmp_path: Path, recorder: TraceRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_recorder, "MOST_WAITING", 450)
    gate = threading.Event()
    real = recorder._file.fits

    def fits(num_bytes: int) -> bool:
        gate.wait()
        return real(num_bytes)

    monkeypatch.setattr(recorder._file, "fits", fits)
    for i in range(5):
        recorder.record(KEYS, float(i), i)
    assert recorder.dropped == 3
    gate.set()
    recorder.close()
    assert [request["n"] for request in lines(tmp_path / "trace")[1:]] == [0, 1]


def test_a_chain_too_long_for_an_empty_file_is_dropped_alone(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    recorder = TraceRecorder(path, max_bytes=4096, chunk_tokens=256)
    for i, stop in enumerate((2, 200, 4)):
        recorder.record(KEYS[:stop], float(i), stop)
    recorder.close()
    assert recorder.dropped == 1
    assert [request["n"] for request in lines(path)[1:]] == [2, 4]


def test_nothing_is_recorded_after_closing(tmp_path: Path, recorder: TraceRecorder) -> None:
    recorder.close()
    recorder.close()
    recorder.record(KEYS, 0.0, 1)
    assert recorder.dropped == 1
    assert (tmp_path / "trace").read_bytes() == b""


def test_a_disk_that_fails_ends_the_recording_and_the_log_says_so_once(
    tmp_path: Path, recorder: TraceRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    # The file behind the descriptor becomes one that is always full.
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, recorder._file._fd)
    os.close(full)
    with caplog.at_level(logging.WARNING):
        for i in range(50):
            recorder.record(KEYS, float(i), 1)
        recorder._thread.join()
        for i in range(50):
            recorder.record(KEYS, float(i), 1)
        recorder.close()
    assert recorder.dropped == 100
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        f"recording to {tmp_path / 'trace'} has ended"
    ]


def test_what_was_written_outlives_a_kill_and_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    code = (
        "import sys; from rootcellar.tiers.trace_recorder import TraceRecorder;"
        f"recorder = TraceRecorder({str(path)!r}, max_bytes=1 << 20, chunk_tokens=256);"
        "recorder.record([b'a', b'b'], 0.0, 5); sys.stdin.read()"
    )
    command = [sys.executable, "-P", "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as other:
        try:
            while not path.exists() or b'"new"' not in path.read_bytes():
                assert other.poll() is None
        finally:
            other.kill()
    with path.open("ab") as file:
        file.write(b'{"t": 1.0, "n"')
    recorder = TraceRecorder(path, max_bytes=1 << 20, chunk_tokens=256)
    recorder.record([b"a"], 0.0, 6)
    recorder.close()
    assert [line.get("n") for line in lines(path)] == [None, 5, None, 6]


def test_opening_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_bytes is 9, must be at least 4096"):
        TraceRecorder(tmp_path / "trace", max_bytes=9, chunk_tokens=256)
    with pytest.raises(FileNotFoundError):
        TraceRecorder(tmp_path / "none" / "trace", max_bytes=4096, chunk_tokens=256)


def test_it_imports_neither_numba_nor_torch() -> None:
    code = (
        "import sys, rootcellar.tiers.trace_recorder;"
        "assert not {'numba', 'torch', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
