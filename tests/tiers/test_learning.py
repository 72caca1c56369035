"""What admission learned outlives the process, and what requests asked for is recorded."""

import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootcellar.admission.always import Always
from rootcellar.admission.base import Chain
from rootcellar.tiers.admission_file import AdmissionFile, _pack, _unpack
from rootcellar.tiers.config import StoreConfig
from rootcellar.tiers.inspect import inspect_store
from rootcellar.tiers.learning import SAVE_EVERY_S, Learning
from rootcellar.tiers.store import TieredStore
from rootcellar.tiers.toy import CHUNK_BYTES, FILE_BYTES, NAMESPACE, chunks_of, keys_of
from rootcellar.tiers.verify import verify_store

FILE = "admission.bin"


class Counting(Always):
    """Learns how many requests there were."""

    def __init__(self) -> None:
        self.requests = 0
        self.restored: bytes | None = None

    def observe(self, chain: Chain, now_s: float) -> None:
        self.requests += 1

    def save(self) -> bytes:
        return b"%d" % self.requests

    def restore(self, data: bytes) -> None:
        self.restored = data
        self.requests = int(data)


def _config(root: Path, policy: Always) -> StoreConfig:
    return StoreConfig(
        dram_bytes=8 * CHUNK_BYTES,
        nvme_path=root / "store",
        nvme_bytes=32 * FILE_BYTES,
        io="threads",
        admission=lambda: policy,
    )


def _run(root: Path, num_requests: int) -> Counting:
    policy = Counting()
    with TieredStore(_config(root, policy), NAMESPACE) as store:
        for _ in range(num_requests):
            store.observe(keys_of((1, 2)))
    return policy


def test_a_restart_goes_on_where_the_last_process_ended(tmp_path: Path) -> None:
    assert _run(tmp_path, 2).restored is None
    policy = _run(tmp_path, 3)
    assert (policy.restored, policy.requests) == (b"2", 5)
    path = tmp_path / "store" / FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert _run(tmp_path, 0).restored == b"5"


@pytest.mark.parametrize("spoilt", ["flipped", "cut", "empty", "foreign", "a folder"])
def test_what_is_not_whole_is_ignored_said_and_replaced(
    tmp_path: Path, spoilt: str, caplog: pytest.LogCaptureFixture
) -> None:
    _run(tmp_path, 2)
    path = tmp_path / "store" / FILE
    content = path.read_bytes()
    path.unlink()
    if spoilt == "a folder":
        path.mkdir()
    else:
        damaged = {
            "flipped": content[:-1] + bytes([content[-1] ^ 1]),
            "cut": content[:-1],
            "empty": b"",
            "foreign": _pack(b"Another", b"2"),
        }
        path.write_bytes(damaged[spoilt])
    assert _run(tmp_path, 1).restored is None
    assert FILE in caplog.text
    if spoilt == "a folder":
        path.rmdir()
        _run(tmp_path, 1)
    assert _run(tmp_path, 0).restored == b"1"


@given(data=st.binary(max_size=200), at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_no_flipped_bit_goes_unnoticed(data: bytes, at: int, bit: int) -> None:
    packed = bytearray(_pack(b"Policy", data))
    assert _unpack(bytes(packed), b"Policy") == data
    packed[at % len(packed)] ^= 1 << bit
    assert _unpack(bytes(packed), b"Policy") is None


def test_it_is_saved_every_minute_while_there_is_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    policy, file = Counting(), AdmissionFile(tmp_path, "Counting")
    learning = Learning(policy, file, None, chunk_tokens=8)
    given: list[bytes] = []
    monkeypatch.setattr(file, "write_soon", given.append)
    learning.save_if_due(1e9)
    learning.observe([], 100.0, None)
    learning.observe([], 101.0, None)
    learning.save_if_due(100.0 + SAVE_EVERY_S - 1)
    assert given == []
    for _ in range(2):
        learning.save_if_due(100.0 + SAVE_EVERY_S)
    assert given == [b"2"]
    learning.observe([], 500.0, None)
    learning.save_if_due(501.0)
    assert given == [b"2"]
    learning.close()
    assert given == [b"2", b"3"]


def test_a_disk_that_refuses_it_is_said_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = AdmissionFile(tmp_path / "gone", "Counting")
    file.write_soon(b"1")
    file.close()
    assert "cannot be written" in caplog.text
    assert file.read() == b""


def test_the_store_is_inspected_and_verified_with_it(tmp_path: Path) -> None:
    with TieredStore(_config(tmp_path, Counting()), NAMESPACE) as store:
        store.put(keys_of((1, 2)), chunks_of((1, 2)))
    root = tmp_path / "store"
    assert (root / FILE).exists()
    assert inspect_store(root)["namespaces"][0]["chunks"] == 2
    result = verify_store(root, progress=lambda done, total: None)
    assert (result["chunks"], result["bad"]) == (2, [])
    assert os.listdir(root / "tmp") == []


def test_requests_are_recorded_as_they_come(tmp_path: Path) -> None:
    trace = tmp_path / "day.trace"
    config = replace(_config(tmp_path, Counting()), trace_path=trace, trace_bytes="1MiB")
    with TieredStore(config, NAMESPACE) as store:
        store.observe(keys_of((1, 2)))
        store.observe(keys_of((1, 2, 3)), num_tokens=30)
        assert store.stats()["trace_dropped_requests"] == 0
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert len(lines) == 3  # what it is, and two requests
    assert stat.S_IMODE(trace.stat().st_mode) == 0o600


def test_a_recording_that_cannot_be_made_is_refused_before_a_store_is(tmp_path: Path) -> None:
    config = _config(tmp_path, Counting())
    with pytest.raises(ValueError, match=r"trace_path is .*cannot be recorded to"):
        TieredStore(replace(config, trace_path=tmp_path / "no" / "folder"), NAMESPACE)
    with pytest.raises(ValueError, match="trace_bytes is 'much'"):
        replace(config, trace_bytes="much")
    with TieredStore(config, NAMESPACE):
        pass  # nothing of the failed opening holds the directory
