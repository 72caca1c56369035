import errno
import gc
import os
import pickle
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rootcellar.tiers import arena as arena_module
from rootcellar.tiers.arena import ArenaAddress, SharedArena
from rootcellar.tiers.errors import TierError
from rootcellar.tiers.io.testing import open_files

SLOT_BYTES = 8192


def _resident_bytes(arena: SharedArena) -> int:
    return os.fstat(arena.fd).st_blocks * 512


def test_slots_lie_side_by_side_and_can_be_written() -> None:
    arena = SharedArena(SLOT_BYTES, 3)
    for index in range(3):
        arena.slot(index)[:] = bytes([index + 1]) * SLOT_BYTES
    assert arena.buffer == b"".join(bytes([index + 1]) * SLOT_BYTES for index in range(3))
    assert arena.address % 4096 == 0
    arena.close()


@pytest.mark.parametrize("index", [-1, 3])
def test_a_slot_that_does_not_exist_is_an_error(index: int) -> None:
    arena = SharedArena(SLOT_BYTES, 3)
    with pytest.raises(IndexError, match=f"slot is {index}, must be from 0 to 2"):
        arena.slot(index)
    arena.close()


@pytest.mark.parametrize(("slot_bytes", "num_slots"), [(0, 1), (-4096, 1), (4097, 1), (4096, 0)])
def test_sizes_that_make_no_sense_are_refused(slot_bytes: int, num_slots: int) -> None:
    with pytest.raises(ValueError, match=r"is -?\d+, must be"):
        SharedArena(slot_bytes, num_slots)


def test_another_process_sees_the_same_bytes() -> None:
    arena = SharedArena(SLOT_BYTES, 2)
    program = (
        "import sys; from rootcellar.tiers.arena import SharedArena;"
        f"arena = SharedArena.attach(int(sys.argv[1]), {SLOT_BYTES}, 2);"
        "arena.slot(1)[:5] = bytes(arena.slot(0)[:5])"
    )
    arena.slot(0)[:5] = b"there"
    command = [sys.executable, "-P", "-c", program, str(arena.fd)]
    subprocess.run(command, pass_fds=[arena.fd], check=True)
    assert bytes(arena.slot(1)[:5]) == b"there"
    arena.close()


READS_AND_WRITES = """
import pickle, sys
from rootcellar.tiers.errors import TierError

address = pickle.loads(bytes.fromhex(sys.argv[1]))
try:
    arena = address.attach()
except TierError as error:
    sys.exit(str(error))
arena.slot(1)[:5] = bytes(arena.slot(0)[:5])
arena.close()
assert "torch" not in sys.modules
"""


def _other_process(address: ArenaAddress) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-c", READS_AND_WRITES, pickle.dumps(address).hex()]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_process_that_inherited_nothing_finds_it_by_its_address() -> None:
    arena = SharedArena(SLOT_BYTES, 2)
    arena.slot(0)[:5] = b"there"
    done = _other_process(arena.shared_at)
    assert (done.returncode, done.stderr) == (0, "")
    assert bytes(arena.slot(1)[:5]) == b"there"
    arena.close()


def test_an_address_outlives_neither_its_process_nor_its_arena() -> None:
    arena = SharedArena(SLOT_BYTES, 2)
    address = arena.shared_at
    gone = subprocess.Popen(["true"])
    gone.wait()
    done = _other_process(replace(address, pid=gone.pid))
    assert f"the arena of process {gone.pid} cannot be opened" in done.stderr
    arena.close()
    with pytest.raises(TierError, match=f"the arena of process {os.getpid()} cannot be opened"):
        address.attach()


def test_a_mapping_outlives_the_owner_and_closes_what_it_opened() -> None:
    arena = SharedArena(SLOT_BYTES, 2)
    before = open_files()
    mapping = arena.shared_at.attach()
    arena.slot(1)[:4] = b"kept"
    arena.close()
    assert bytes(mapping.slot(1)[:4]) == b"kept"
    mapping.close()
    del arena
    gc.collect()
    assert open_files() < before


def test_a_number_that_stands_for_another_file_by_now_is_refused(tmp_path: Path) -> None:
    arena = SharedArena(SLOT_BYTES, 2)
    for address in (replace(arena.shared_at, num_slots=3), replace(arena.shared_at, num_slots=1)):
        with pytest.raises(TierError, match=f"of {2 * SLOT_BYTES} bytes, not an arena of"):
            address.attach()
    with open(tmp_path / "other", "w+b") as other:
        other.truncate(2 * SLOT_BYTES)
        with pytest.raises(TierError, match="its owner has closed it"):
            replace(arena.shared_at, fd=other.fileno()).attach()
    arena.close()


def test_a_small_arena_is_ready_at_once() -> None:
    arena = SharedArena(SLOT_BYTES, 4)
    assert arena.touched_slots == 4
    assert _resident_bytes(arena) == 4 * SLOT_BYTES
    arena.close()


def test_a_large_one_is_populated_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "STEP_BYTES", 2 * SLOT_BYTES)
    arena = SharedArena(SLOT_BYTES, 99)
    assert 2 <= arena.touched_slots <= 99
    assert arena.wait_touched(99, 30.0)
    assert arena.touched_slots == 99
    assert _resident_bytes(arena) == 99 * SLOT_BYTES
    assert arena.populate_error is None
    arena.close()


def test_closing_does_not_wait_until_all_of_it_is_populated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arena_module, "STEP_BYTES", SLOT_BYTES)
    arena = SharedArena(SLOT_BYTES, 1 << 20)
    arena.close()
    assert arena.touched_slots < 1 << 20


def test_nobody_populates_what_was_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(fd: int, start: int, size_bytes: int) -> None:
        os.fstat(fd)  # still open
        time.sleep(0.05)
        os.fstat(fd)

    monkeypatch.setattr(arena_module, "_MADV_POPULATE_WRITE", 4242)
    monkeypatch.setattr(arena_module, "STEP_BYTES", SLOT_BYTES)
    monkeypatch.setattr(os, "posix_fallocate", allocate)
    arena = SharedArena(SLOT_BYTES, 100)
    time.sleep(0.07)
    arena.close()
    assert arena.populate_error is None
    assert "rootcellar-populate" not in {thread.name for thread in threading.enumerate()}


def test_without_populating_in_the_kernel_the_memory_is_there_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arena_module, "_MADV_POPULATE_WRITE", 4242)  # unknown to any kernel
    arena = SharedArena(SLOT_BYTES, 4)
    assert arena.touched_slots == 4
    assert _resident_bytes(arena) == 4 * SLOT_BYTES
    arena.close()


def test_memory_that_the_machine_refuses_is_never_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = OSError(errno.ENOSPC, "no memory")

    def allocate(fd: int, start: int, size_bytes: int) -> None:
        if start >= 2 * SLOT_BYTES:
            raise refusal

    monkeypatch.setattr(arena_module, "_MADV_POPULATE_WRITE", 4242)
    monkeypatch.setattr(arena_module, "STEP_BYTES", SLOT_BYTES)
    monkeypatch.setattr(os, "posix_fallocate", allocate)
    arena = SharedArena(SLOT_BYTES, 4)
    assert not arena.wait_touched(4, 30.0)
    assert arena.touched_slots == 2
    assert arena.populate_error is refusal
    arena.close()


def test_views_that_outlive_it_stay_valid_and_then_the_memory_goes() -> None:
    before = open_files()
    arena = SharedArena(SLOT_BYTES, 2)
    view = memoryview(arena.slot(1))
    view[:4] = b"kept"
    arena.close()
    arena.close()
    assert bytes(view[:4]) == b"kept"
    del arena, view
    gc.collect()
    assert open_files() == before
