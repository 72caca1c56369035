"""How a backend ends: what is finished, what is given back, and that nothing stays open."""

import os
import threading
from pathlib import Path

import pytest

from rootcellar.tiers.chunk_file import chunk_path
from rootcellar.tiers.index import load
from rootcellar.tiers.io.base import DeleteJob, Job, ReadJob, ReclaimJob, Status, TouchJob, WriteJob
from rootcellar.tiers.io.testing import (
    PATIENCE_S,
    IoWorld,
    Kind,
    file_of,
    key_of,
    make_file,
    meta_of,
    open_files,
)

KINDS: list[Kind] = ["process", "threads"]


@pytest.mark.parametrize("kind", KINDS)
class TestClosing:
    def test_it_finishes_what_was_submitted_and_commits_the_index(
        self, tmp_path: Path, kind: Kind
    ) -> None:
        world = IoWorld(tmp_path / "store", kind)
        world.folder(meta_of(0))
        jobs = [WriteJob(number, meta_of(number), number) for number in range(8)]
        for job in jobs:
            world.fill(job.meta, job.slot)
        world.backend.submit(jobs)
        world.backend.submit([TouchJob(8, tuple((key_of(n), 5.0 + n, n) for n in range(99)))])
        world.backend.close()
        assert [done.status for done in world.backend.poll()] == [Status.OK] * 9
        world.close()
        loaded = load(tmp_path / "store" / "index.lmdb")
        assert loaded.trusted
        assert {row.key for row in loaded.rows} == {job.meta.key for job in jobs}
        reopened = IoWorld(tmp_path / "store", kind)
        assert reopened.found() == {job.meta.key for job in jobs}
        assert not reopened.recovered.repaired
        reopened.close()

    def test_the_index_follows_files_that_are_recycled_removed_and_reclaimed(
        self, tmp_path: Path, kind: Kind
    ) -> None:
        world = IoWorld(tmp_path / "store", kind)
        dropped = meta_of(9, generation=2)
        for meta in [*map(meta_of, range(5)), dropped]:
            world.write(meta)
        victims = [file_of(meta_of(0)), file_of(meta_of(1))]
        world.write(meta_of(5), victims=victims)
        world.delete(file_of(meta_of(2)))
        folder = world.folder(dropped)
        folder.rename(tmp_path / "store" / "dropped" / folder.name)
        world.run(ReclaimJob(world.new_id(), folder.name))
        world.run(TouchJob(world.new_id(), ((key_of(3), 5.5, 7),)))
        world.close()
        rows = {row.key: row for row in load(tmp_path / "store" / "index.lmdb").rows}
        assert set(rows) == {key_of(3), key_of(4), key_of(5)}
        assert (rows[key_of(3)].last_use_s, rows[key_of(3)].hits) == (5.5, 7)

    def test_afterwards_jobs_are_refused_and_nothing_is_left_open(
        self, tmp_path: Path, kind: Kind
    ) -> None:
        IoWorld(tmp_path / "first", kind).close()  # imports and caches are open from now on
        before = open_files()
        world = IoWorld(tmp_path / "store", kind)
        assert world.write(meta_of(1)).status is Status.OK
        assert world.read(meta_of(1)).status is Status.OK
        os.truncate(chunk_path(str(world.root), meta_of(1)), 100)
        assert world.read(meta_of(1)).status is Status.CORRUPT
        world.backend.close()
        world.backend.close()
        assert not world.backend.alive
        assert world.read(meta_of(1)).status is Status.UNAVAILABLE
        world.close()
        assert open_files() == before

    def test_one_lane_serves_reads_and_writes(self, tmp_path: Path, kind: Kind) -> None:
        world = IoWorld(tmp_path / "store", kind, lanes=1)
        world.write(meta_of(1))
        world.fill(meta_of(2), 0)
        jobs: list[Job] = [ReadJob(world.new_id(), meta_of(1), 1) for _ in range(30)]
        jobs.insert(3, WriteJob(world.new_id(), meta_of(2), 0))
        assert {done.status for done in world.run(*jobs)} == {Status.OK}
        world.close()


class _Gate:
    """A pause point that is shut until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, point: str) -> None:
        if point == "verify":
            self.reached.set()
            assert self.open.wait(PATIENCE_S)


def test_when_closing_takes_too_long_only_jobs_not_begun_are_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one under way still owns its slot, so it is waited for."""
    monkeypatch.setattr("rootcellar.tiers.io.threads.CLOSE_TIMEOUT_S", 0.01)
    gate = _Gate()
    world = IoWorld(tmp_path / "store", "threads", lanes=1, pause=gate)
    make_file(world.root, meta_of(1))
    world.backend.submit([ReadJob(1, meta_of(1), 1)])
    assert gate.reached.wait(PATIENCE_S)
    world.backend.submit([ReadJob(2, meta_of(1), 2), DeleteJob(3, (file_of(meta_of(1)),))])
    closing = threading.Thread(target=world.backend.close)
    closing.start()
    given_back = {done.job_id: done.status for done in world.take(2)}
    assert given_back == {2: Status.UNAVAILABLE, 3: Status.UNAVAILABLE}
    closing.join(0.3)
    assert closing.is_alive()
    gate.open.set()
    closing.join(PATIENCE_S)
    assert [(done.job_id, done.status) for done in world.take(1)] == [(1, Status.OK)]
    world.close()


class _LaneEnds(BaseException):
    """Nothing that a lane expects."""


def test_a_lane_that_ends_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ended = threading.Event()

    def pause(point: str) -> None:
        if point == "verify" and not ended.is_set():
            ended.set()
            raise _LaneEnds

    world = IoWorld(tmp_path / "store", "threads", lanes=1, pause=pause)
    make_file(world.root, meta_of(1))
    world.backend.submit([ReadJob(world.new_id(), meta_of(1), 1)])
    assert ended.wait(PATIENCE_S)
    assert world.read(meta_of(1)).status is Status.OK
    assert "lane 0 ended" in caplog.messages
    world.close()
