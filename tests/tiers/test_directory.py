import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from rootcellar.tiers.directory import claim, clear_temporaries, holder, require_store
from rootcellar.tiers.errors import FormatVersionError, StoreLockedError


def _tree(root: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
    }


@pytest.mark.parametrize("exists", [False, True])
def test_an_absent_or_empty_directory_becomes_a_store(tmp_path: Path, exists: bool) -> None:
    root = tmp_path / "store"
    if exists:
        root.mkdir()
    claim(root).close()
    require_store(root)
    assert {path.name for path in root.iterdir()} == {"FORMAT", "lock", "chunks", "tmp", "dropped"}
    assert json.loads((root / "FORMAT").read_text()) == {"format": "rootcellar", "version": 1}


def test_only_the_owner_can_read_it(tmp_path: Path) -> None:
    claim(tmp_path / "store").close()
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "store").rglob("*")}
    assert modes == {0o700, 0o600}
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700


def test_a_second_opener_is_told_the_pid_also_in_one_process(tmp_path: Path) -> None:
    lock = claim(tmp_path)
    for _ in range(2):  # being refused changes nothing
        with pytest.raises(StoreLockedError, match=f"process {os.getpid()}"):
            claim(tmp_path)
    assert holder(tmp_path) == os.getpid()
    lock.close()
    lock.close()
    assert holder(tmp_path) is None
    claim(tmp_path).close()


def test_another_process_is_told_the_pid(tmp_path: Path) -> None:
    lock = claim(tmp_path)
    program = (
        "import sys; from pathlib import Path; from rootcellar.tiers.directory import *;"
        "print(holder(Path(sys.argv[1])), flush=True); claim(Path(sys.argv[1]))"
    )
    command = [sys.executable, "-P", "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == f"{os.getpid()}\n"
    assert f"StoreLockedError: {tmp_path} is in use by process {os.getpid()}" in done.stderr
    lock.close()


def test_the_lock_of_a_dead_process_is_free(tmp_path: Path) -> None:
    claim(tmp_path).close()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / "lock").write_text(f"{gone.pid}\n")
    assert holder(tmp_path) is None
    lock = claim(tmp_path)
    assert holder(tmp_path) == os.getpid()
    lock.close()


def test_a_process_that_was_killed_and_not_waited_for_holds_nothing(tmp_path: Path) -> None:
    claim(tmp_path).close()
    killed = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with killed:
        (tmp_path / "lock").write_text(f"{killed.pid}\n")
        assert holder(tmp_path) == killed.pid
        killed.kill()
        os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
        assert holder(tmp_path) is None


def test_whoever_inherits_the_descriptor_keeps_it_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = claim(tmp_path)
    program = "import sys; sys.stdin.read()"
    command = [sys.executable, "-c", program]
    monkeypatch.setattr("rootcellar.tiers.directory.ORPHAN_GRACE_S", 0.05)
    heir = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[lock.fd])
    with heir:
        lock.close()
        with pytest.raises(StoreLockedError, match="in use by another process"):
            claim(tmp_path)
        heir.kill()
    claim(tmp_path).close()


def test_a_newer_format_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "FORMAT").write_text('{"format": "rootcellar", "version": 2}')
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / "a temporary of it").write_bytes(b"x")
    before = _tree(tmp_path)
    with pytest.raises(FormatVersionError, match="format version 2, this rootcellar reads 1"):
        claim(tmp_path)
    with pytest.raises(FormatVersionError):
        require_store(tmp_path)
    assert _tree(tmp_path) == before


@pytest.mark.parametrize("content", ["", "{", "[]", "7", "{}", '{"version": null}', "\xff"])
def test_a_format_that_says_nothing_is_refused_and_untouched(tmp_path: Path, content: str) -> None:
    (tmp_path / "FORMAT").write_text(content, encoding="latin-1")
    before = _tree(tmp_path)
    with pytest.raises(FormatVersionError, match=str(tmp_path)):
        claim(tmp_path)
    assert _tree(tmp_path) == before


@pytest.mark.parametrize("name", ["photos", "index.lmdb", "FORMAT.old"])
def test_a_directory_of_something_else_is_refused_and_untouched(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=f"it holds other files, such as '{name}'"):
        claim(tmp_path)
    with pytest.raises(ValueError, match="is not a store"):
        require_store(tmp_path)
    assert os.listdir(tmp_path) == [name]


def test_a_file_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    with pytest.raises(ValueError, match="is not a directory"):
        claim(tmp_path / "file")
    with pytest.raises(ValueError, match="Make or mount it first"):
        claim(tmp_path / "file" / "below")
    assert (tmp_path / "file").read_text() == "content"


def test_a_missing_parent_is_refused_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Make or mount it first"):
        claim(tmp_path / "absent" / "store")
    assert os.listdir(tmp_path) == []


def test_a_place_that_takes_no_directory_is_refused() -> None:
    with pytest.raises(ValueError, match="/proc/store cannot be a store"):
        claim(Path("/proc/store"))


def test_a_directory_that_may_not_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(ValueError, match="it is not writable"):
        claim(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_folder_whose_place_is_taken_is_refused_and_unlocked(tmp_path: Path) -> None:
    claim(tmp_path).close()
    (tmp_path / "chunks").rmdir()
    (tmp_path / "chunks").write_text("")
    with pytest.raises(ValueError, match="cannot be a store"):
        claim(tmp_path)
    (tmp_path / "chunks").unlink()
    claim(tmp_path).close()


def test_a_first_opening_that_died_anywhere_is_no_obstacle(tmp_path: Path) -> None:
    for name in ("chunks", "tmp", "dropped"):
        (tmp_path / name).mkdir()
    (tmp_path / "lock").write_text("")
    (tmp_path / "FORMAT.new").write_text('{"form')
    claim(tmp_path).close()
    require_store(tmp_path)
    assert not (tmp_path / "FORMAT.new").exists()


def test_temporaries_are_swept_whatever_they_are(tmp_path: Path) -> None:
    claim(tmp_path).close()
    (tmp_path / "tmp" / "file").write_bytes(b"x")
    (tmp_path / "tmp" / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "tmp" / "link").symlink_to(tmp_path)
    assert clear_temporaries(tmp_path) == 3
    assert os.listdir(tmp_path / "tmp") == []
    assert (tmp_path / "FORMAT").exists()
