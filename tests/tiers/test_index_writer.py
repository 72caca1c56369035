import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rootcellar.tiers import index_writer as writer_module
from rootcellar.tiers.index import load, rewrite
from rootcellar.tiers.index_writer import BATCH_CHANGES, IndexWriter
from rootcellar.tiers.io.base import no_pause
from rootcellar.tiers.io.testing import file_of, key_of, meta_of


class _Gate:
    """A pause point that counts commits and can be shut."""

    def __init__(self) -> None:
        self.commits = 0
        self.open = threading.Event()
        self.open.set()

    def __call__(self, point: str) -> None:
        assert point == "commit"
        self.commits += 1
        assert self.open.wait(30)


def _until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def _keys(path: Path) -> set[bytes]:
    return {row.key for row in load(path).rows}


def test_changes_are_there_after_closing_in_the_order_they_were_made(tmp_path: Path) -> None:
    writer = IndexWriter(tmp_path / "index", no_pause)
    for number in range(5):
        writer.put(meta_of(number), 20480, 1.0)
    writer.touch(key_of(1), 7.5, 3)
    writer.delete(file_of(meta_of(2)))
    writer.delete(file_of(meta_of(3)))
    writer.put(meta_of(3, payload_bytes=8192), 12288, 2.0)
    writer.delete(file_of(meta_of(4, generation=9)))  # an older life's file: another row
    writer.close()
    rows = {row.key: row for row in load(tmp_path / "index").rows}
    assert set(rows) == {key_of(number) for number in (0, 1, 3, 4)}
    assert (rows[key_of(1)].last_use_s, rows[key_of(1)].hits) == (7.5, 3)
    assert rows[key_of(3)].file_bytes == 12288
    assert writer.failures == 0


def test_a_full_batch_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "BATCH_DELAY_S", 3600.0)
    gate = _Gate()
    writer = IndexWriter(tmp_path / "index", gate)
    for number in range(BATCH_CHANGES - 1):
        writer.put(meta_of(number), 20480, 1.0)
    assert gate.commits == 0
    writer.put(meta_of(BATCH_CHANGES), 20480, 1.0)
    _until(lambda: gate.commits == 1)
    writer.put(meta_of(BATCH_CHANGES + 1), 20480, 1.0)
    time.sleep(0.05)
    assert gate.commits == 1, "the next batch is not full"
    writer.close()
    assert len(_keys(tmp_path / "index")) == BATCH_CHANGES + 1


def test_a_few_changes_are_committed_after_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "BATCH_DELAY_S", 0.05)
    gate = _Gate()
    writer = IndexWriter(tmp_path / "index", gate)
    writer.put(meta_of(1), 20480, 1.0)
    _until(lambda: gate.commits == 1)
    writer.put(meta_of(2), 20480, 1.0)
    _until(lambda: gate.commits == 2)
    writer.close()
    assert _keys(tmp_path / "index") == {key_of(1), key_of(2)}


def test_nobody_waits_for_a_commit(tmp_path: Path) -> None:
    gate = _Gate()
    gate.open.clear()
    writer = IndexWriter(tmp_path / "index", gate)
    for number in range(3 * BATCH_CHANGES):
        writer.put(meta_of(number), 20480, 1.0)
    _until(lambda: gate.commits == 1)
    for number in range(3 * BATCH_CHANGES):
        writer.delete(file_of(meta_of(number)))
    gate.open.set()
    writer.close()
    assert _keys(tmp_path / "index") == set()


def test_only_one_whole_life_of_a_writer_keeps_the_trust(tmp_path: Path) -> None:
    path = tmp_path / "index"
    rewrite(path, [], [], trust=True)
    first = IndexWriter(path, no_pause)
    first._release.close()  # as if killed: not closed
    first._env = None
    first.close()
    assert not load(path).trusted
    IndexWriter(path, no_pause).close()
    assert not load(path).trusted
    rewrite(path, [], [], trust=True)
    IndexWriter(path, no_pause).close()
    assert load(path).trusted


@contextmanager
def _full_disk() -> Iterator[None]:
    """No file of this process may grow any more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_survived_counted_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "MOST_CHANGES", BATCH_CHANGES)
    path = tmp_path / "index"
    rewrite(path, [], [], trust=True)
    writer = IndexWriter(path, no_pause)
    with _full_disk():
        for number in range(3 * BATCH_CHANGES):
            writer.put(meta_of(number), 20480, 1.0)
        _until(lambda: writer.failures > 1)
    writer.put(meta_of(1), 20480, 1.0)
    writer.close()
    said = [record.getMessage() for record in caplog.records]
    assert len([line for line in said if "the index cannot be written" in line]) == 1
    assert not load(path).trusted


def test_a_directory_that_is_gone_is_survived(tmp_path: Path) -> None:
    writer = IndexWriter(tmp_path / "index", no_pause)
    shutil.rmtree(tmp_path / "index")
    writer.put(meta_of(1), 20480, 1.0)
    writer.close()


def test_a_path_that_is_a_file_is_survived_and_counted(tmp_path: Path) -> None:
    (tmp_path / "index").write_text("not a directory")
    writer = IndexWriter(tmp_path / "index", no_pause)
    for number in range(2 * BATCH_CHANGES):
        writer.put(meta_of(number), 20480, 1.0)
    writer.close()
    assert writer.failures == 1
    assert (tmp_path / "index").read_text() == "not a directory"
