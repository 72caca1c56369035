"""The IO process is killed for real, at chosen points; and so is its parent."""

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rootcellar.tiers.arena import SharedArena
from rootcellar.tiers.chunk_file import HEADER_BYTES
from rootcellar.tiers.directory import claim
from rootcellar.tiers.errors import StoreLockedError, TierError
from rootcellar.tiers.io.base import Completion, DeleteJob, Job, ReadJob, Status, WriteJob
from rootcellar.tiers.io.life import Birth, WorkerLife
from rootcellar.tiers.io.process import ProcessBackend
from rootcellar.tiers.io.testing import (
    PATIENCE_S,
    SLOT_BYTES,
    IoWorld,
    file_of,
    make_file,
    meta_of,
    open_files,
)
from rootcellar.tiers.recover import open_directory


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.005)


def _state(pid: int) -> str:
    """A letter, as in ps; empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


class _World(IoWorld):
    def __init__(self, root: Path, hold: str = "") -> None:
        super().__init__(root, "process", hold=hold)
        self.pid = self.worker_pid()

    def worker_pid(self) -> int:
        """Of the process that serves now."""
        assert isinstance(self.backend, ProcessBackend)
        pid = self.backend.worker_pid
        assert pid is not None
        return pid

    def wait_held(self) -> None:
        """Until the worker stopped at its pause point."""
        _until(lambda: _state(self.pid) == "T", "the worker does not come to its pause point")

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait_restarted(self, times: int = 1) -> None:
        """Until a worker after `times` deaths serves."""
        _until(lambda: self.backend.restarts >= times, "no restart")
        _until(lambda: self.backend.alive, "not alive")

    def scan(self) -> set[str]:
        """Names of all chunk files, whole or not."""
        return {path.name for path in self.root.rglob("*.kv")}


@pytest.fixture
def world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[_World]:
    world = _World(tmp_path / "store", getattr(request, "param", ""))
    yield world
    world.close()
    assert os.listdir(world.root / "tmp") == []
    assert _state(world.pid) == ""


hold = pytest.mark.parametrize


@hold("world", ["verify"], indirect=True)
def test_killed_in_a_read_the_job_is_unavailable_once_and_the_chunk_stays(world: _World) -> None:
    make_file(world.root, meta_of(1))
    world.backend.submit([ReadJob(1, meta_of(1), 1)])
    world.wait_held()
    assert world.backend.poll() == []
    world.kill()
    assert [(done.job_id, done.status) for done in world.take(1)] == [(1, Status.UNAVAILABLE)]
    world.wait_restarted()
    assert world.read(meta_of(1)).status is Status.OK
    assert world.holds(meta_of(1))
    assert world.backend.restarts == 1


@hold("world", ["write", "rename"], indirect=True)
@pytest.mark.parametrize("recycling", [False, True], ids=["new file", "recycled"])
def test_killed_in_a_write_nothing_of_it_is_left(world: _World, recycling: bool) -> None:
    make_file(world.root, meta_of(1))
    world.fill(meta_of(2), 0)
    victims = (file_of(meta_of(1)),) if recycling else ()
    world.backend.submit([WriteJob(1, meta_of(2), 0, victims)])
    world.wait_held()
    assert len(world.temporaries()) == 1
    world.kill()
    assert world.take(1)[0].status is Status.UNAVAILABLE
    world.wait_restarted()
    assert world.read(meta_of(2)).status is Status.MISSING
    assert world.temporaries() == [], "the new worker sweeps before it serves"
    assert world.read(meta_of(1)).status is (Status.MISSING if recycling else Status.OK)
    assert world.write(meta_of(2)).status is Status.OK


@hold("world", ["commit"], indirect=True)
def test_killed_in_a_commit_the_files_are_found_again(world: _World) -> None:
    for number in range(3):
        parent = number - 1 if number else None
        assert world.write(meta_of(number, parent)).status is Status.OK
    world.wait_held()
    world.kill()
    world.wait_restarted()
    world.close()
    reopened = IoWorld(world.root, "threads")
    assert reopened.found() == {meta_of(number).key for number in range(3)}
    assert reopened.recovered.repaired["files without a row"] == 3
    reopened.close()


@hold("world", ["verify"], indirect=True)
def test_completions_from_before_the_death_are_delivered(world: _World) -> None:
    for number in (1, 2):
        make_file(world.root, meta_of(number))
    deletion, reading = DeleteJob(1, (file_of(meta_of(2)),)), ReadJob(2, meta_of(1), 1)
    world.backend.submit([deletion])
    _until(lambda: len(world.scan()) == 1, "the file is not deleted")
    world.backend.submit([reading])
    world.wait_held()
    world.kill()
    done = {completion.job_id: completion.status for completion in world.take(2)}
    assert done == {1: Status.OK, 2: Status.UNAVAILABLE}


def test_jobs_are_refused_until_a_new_process_serves(world: _World) -> None:
    world.kill()
    _until(lambda: not world.backend.alive, "the death is not noticed")
    assert world.delete().status is Status.UNAVAILABLE
    world.wait_restarted()
    assert world.worker_pid() != world.pid
    assert world.delete().status is Status.OK


def test_it_comes_back_again_and_again(world: _World) -> None:
    make_file(world.root, meta_of(1))
    for deaths in (1, 2, 3):
        os.kill(world.worker_pid(), signal.SIGKILL)
        world.wait_restarted(deaths)
        assert world.read(meta_of(1)).status is Status.OK


def test_a_process_that_cannot_be_started_is_tried_again(
    world: _World, monkeypatch: pytest.MonkeyPatch
) -> None:
    births: list[str] = []

    def refuse_twice(birth: Birth) -> WorkerLife:
        births.append("tried")
        if len(births) < 3:
            raise OSError(errno.EAGAIN, "no more processes")
        return WorkerLife(birth)

    monkeypatch.setattr("rootcellar.tiers.io.process.WorkerLife", refuse_twice)
    monkeypatch.setattr("rootcellar.tiers.io.process.LONGEST_DELAY_S", 0.05)
    world.kill()
    world.wait_restarted()
    assert (len(births), world.backend.restarts) == (3, 1)
    assert world.delete().status is Status.OK


def test_without_any_process_there_is_no_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    IoWorld(tmp_path / "store", "threads").close()
    before = open_files()
    monkeypatch.setattr(sys, "executable", "/absent")
    recovered, arena = open_directory(tmp_path / "store"), SharedArena(SLOT_BYTES, 1)
    with pytest.raises(TierError, match="cannot be started"):
        ProcessBackend(tmp_path / "store", arena, lanes=1, itemsize=2, lock_fd=recovered.lock.fd)
    arena.close()
    recovered.lock.close()
    assert open_files() == before


def test_killed_at_any_moment_each_job_comes_back_once(world: _World) -> None:
    for number in range(8):
        make_file(world.root, meta_of(number))
    next_id = 0
    for deaths in (1, 2, 3, 4):
        jobs: list[Job] = [ReadJob(next_id + at, meta_of(at % 8), at % 8) for at in range(400)]
        next_id += len(jobs)
        world.backend.submit(jobs)
        time.sleep(0.004 * deaths)
        os.kill(world.worker_pid(), signal.SIGKILL)
        done = world.take(len(jobs))
        assert {completion.job_id for completion in done} == {job.job_id for job in jobs}
        assert {completion.status for completion in done} <= {Status.OK, Status.UNAVAILABLE}
        world.wait_restarted(deaths)


def test_closed_while_there_is_no_process(tmp_path: Path) -> None:
    before = open_files()
    world = _World(tmp_path / "store")
    world.kill()
    world.close()
    assert world.backend.poll() == []
    assert open_files() == before


@hold("world", ["verify"], indirect=True)
def test_jobs_that_do_not_fit_into_the_socket_follow_later(world: _World) -> None:
    """The worker hangs: submit does not, and everything arrives once it goes on."""
    for number in range(2):
        make_file(world.root, meta_of(number))
    world.backend.submit([ReadJob(number, meta_of(number), number) for number in range(2)])
    world.wait_held()
    files = tuple(file_of(meta_of(9)) for _ in range(40_000))
    world.backend.submit([DeleteJob(2, files), DeleteJob(3, files)])
    assert world.backend.poll() == []
    done: list[Completion] = []
    while len(done) < 4:
        os.kill(world.pid, signal.SIGCONT)  # each of the reads stops it
        world.backend.wait(0.01)
        done += world.backend.poll()
    assert {completion.status for completion in done} == {Status.OK}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_to_the_group_leave_it_to_its_parent(world: _World, number: int) -> None:
    os.kill(world.pid, number)  # perhaps before its first line has run
    make_file(world.root, meta_of(1))
    assert world.read(meta_of(1)).status is Status.OK
    os.kill(world.pid, number)
    assert world.read(meta_of(1)).status is Status.OK
    assert world.backend.restarts == 0


def test_a_full_disk_is_a_result_and_leaves_nothing(world: _World) -> None:
    make_file(world.root, meta_of(1))
    assert world.write(meta_of(2)).status is Status.OK
    _, hard = resource.prlimit(world.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(world.pid, resource.RLIMIT_FSIZE, (HEADER_BYTES + 4096, hard))
    done = world.write(meta_of(3))
    assert (done.status, done.leaked_bytes) == (Status.FAILED, 0)
    done = world.write(meta_of(3), victims=[file_of(meta_of(2))])
    assert (done.status, done.leaked_bytes) == (Status.FAILED, 0)
    assert world.temporaries() == []
    assert world.scan() == {f"{meta_of(1).key.hex()}.kv"}
    assert world.read(meta_of(1)).status is Status.OK
    assert world.backend.restarts == 0


def test_without_descriptors_a_chunk_is_missed_but_not_lost(world: _World) -> None:
    make_file(world.root, meta_of(1))
    assert world.read(meta_of(1)).status is Status.OK
    before = resource.prlimit(world.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(world.pid, resource.RLIMIT_NOFILE, (3, before[1]))
    assert world.read(meta_of(1)).status is Status.UNAVAILABLE
    resource.prlimit(world.pid, resource.RLIMIT_NOFILE, before)
    assert world.read(meta_of(1)).status is Status.OK


def test_one_life_gives_each_job_back_once(tmp_path: Path) -> None:
    world = IoWorld(tmp_path / "store", "threads")
    birth = Birth(world.root, world.arena, world.recovered.lock.fd, lanes=2, itemsize=2)
    life = WorkerLife(birth, hold="verify")
    make_file(world.root, meta_of(1))
    life.send([ReadJob(1, meta_of(1), 1)])
    _until(lambda: _state(life.pid) == "T", "the worker does not come to its pause point")
    life.kill()
    assert life.wait_dead() == -signal.SIGKILL
    assert [done.status for done in life.take()] == [Status.UNAVAILABLE]
    assert life.take() == []
    life.release()
    life.release()
    world.close()


def test_a_worker_whose_socket_ends_ends_too(tmp_path: Path) -> None:
    world = IoWorld(tmp_path / "store", "threads")
    birth = Birth(world.root, world.arena, world.recovered.lock.fd, lanes=2, itemsize=2)
    life = WorkerLife(birth)
    life._socket.close()
    assert life.wait_dead() == 1
    life.release()
    world.close()


_OWNER = """
import os, sys, time
from pathlib import Path
from rootcellar.tiers.io.testing import *
world = IoWorld(Path(sys.argv[1]), "process", hold=sys.argv[2])
world.folder(meta_of(1))
world.fill(meta_of(1), 0)
world.backend.submit([WriteJob(1, meta_of(1), 0)])
print(world.backend.worker_pid, flush=True)
if sys.argv[3:]:
    os.fork()  # the child keeps the socket open
time.sleep(60)
"""


def _start_owner(root: Path, hold: str = "", *more: str) -> tuple["subprocess.Popen[str]", int]:
    command = [sys.executable, "-P", "-c", _OWNER, str(root), hold, *more]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    return owner, int(owner.stdout.readline())


def test_an_orphan_ends_and_frees_the_lock(tmp_path: Path) -> None:
    owner, worker_pid = _start_owner(tmp_path / "store")
    with owner:
        _until(lambda: len(list(tmp_path.rglob("*.kv"))) == 1, "nothing is written")
        owner.kill()
        owner.wait()
        reopened = IoWorld(tmp_path / "store", "threads")
        assert _state(worker_pid) in ("", "Z")
        assert reopened.found() == {meta_of(1).key}
        reopened.close()


def test_an_orphan_ends_even_if_a_forked_child_keeps_its_socket_open(tmp_path: Path) -> None:
    owner, worker_pid = _start_owner(tmp_path / "store", "", "with a forked child")
    with owner:
        child = Path(f"/proc/{owner.pid}/task/{owner.pid}/children")
        _until(lambda: len(child.read_text().split()) == 2, "no child is forked")
        pids = set(map(int, child.read_text().split())) - {worker_pid}
        _until(lambda: len(list(tmp_path.rglob("*.kv"))) == 1, "nothing is written")
        owner.kill()
        owner.wait()
        _until(lambda: _state(worker_pid) in ("", "Z"), "the orphan does not end")
        os.kill(pids.pop(), signal.SIGKILL)


def test_while_an_orphan_may_still_write_the_directory_stays_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, worker_pid = _start_owner(tmp_path / "store", "rename")
    with owner:
        _until(lambda: _state(worker_pid) == "T", "the worker does not come to its pause point")
        with pytest.raises(StoreLockedError, match=f"process {owner.pid}"):
            claim(tmp_path / "store")
        owner.kill()
        owner.wait()
        monkeypatch.setattr("rootcellar.tiers.directory.ORPHAN_GRACE_S", 0.2)
        with pytest.raises(StoreLockedError, match=str(owner.pid)):
            claim(tmp_path / "store")
        assert len(os.listdir(tmp_path / "store" / "tmp")) == 1
        os.kill(worker_pid, signal.SIGKILL)
        monkeypatch.setattr("rootcellar.tiers.directory.ORPHAN_GRACE_S", PATIENCE_S)
        claim(tmp_path / "store").close()
        assert os.listdir(tmp_path / "store" / "tmp") == []


def test_nothing_of_a_killed_owner_is_left_in_shared_memory(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    owner, worker_pid = _start_owner(tmp_path / "store", "")
    with owner:
        owner.kill()
        owner.wait()
        _until(lambda: _state(worker_pid) in ("", "Z"), "the orphan does not end")
    left = set(os.listdir("/dev/shm")) - before
    assert not [name for name in left if "rootcellar" in name]
