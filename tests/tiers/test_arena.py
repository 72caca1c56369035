import errno
import gc
import os
import subprocess
import sys
import threading
import time

import pytest

from rootcellar.tiers import arena as arena_module
from rootcellar.tiers.arena import SharedArena
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
