import errno
import logging
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rootcellar.tiers import arena as arena_module
from rootcellar.tiers import opening, pinning
from rootcellar.tiers.arena import ArenaMapping, SharedArena
from rootcellar.tiers.config import StoreConfig
from rootcellar.tiers.pinning import PIECE_BYTES, ArenaPinner
from rootcellar.tiers.store import TieredStore
from rootcellar.tiers.toy import CHUNK_BYTES, NAMESPACE

SLOT_BYTES = 4096
WAIT_S = 30.0


class FakeCuda:
    """Registers like CUDA: every byte once, whole and known addresses only, one thread's errors.

    Refuses from call number `refuse_from` on; `hold` keeps a call under way for as long as it is
    clear.
    """

    def __init__(self, refuse_from: int = 1 << 30, error: RuntimeError | None = None) -> None:
        self.registered: dict[int, int] = {}
        self.sizes: list[int] = []
        self.refuse_from = refuse_from
        self.error = error
        self.called = threading.Event()
        self.hold = threading.Event()
        self.hold.set()
        self.threads: set[str] = set()

    def register(self, address: int, size_bytes: int, /) -> int:
        self._called()
        assert self.hold.wait(WAIT_S)
        if len(self.sizes) >= self.refuse_from:
            if self.error is not None:
                raise self.error
            return 2
        for start, size in self.registered.items():
            assert address + size_bytes <= start or start + size <= address
        self.registered[address] = size_bytes
        self.sizes.append(size_bytes)
        return 0

    def unregister(self, address: int, /) -> int:
        self._called()
        del self.registered[address]
        if self.error is not None:
            raise self.error
        return 0

    def describe(self, code: int, /) -> str:
        return f"out of memory ({code})"

    def _called(self) -> None:
        self.threads.add(threading.current_thread().name)
        self.called.set()


@contextmanager
def _arena(num_slots: int, slot_bytes: int = SLOT_BYTES) -> Iterator[SharedArena]:
    arena = SharedArena(slot_bytes, num_slots)
    yield arena
    arena.close()


@pytest.fixture
def pieces_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "PIECE_BYTES", 3 * SLOT_BYTES + 100)


def _never_more_than_touched(arena: SharedArena, cuda: FakeCuda) -> None:
    end = max((start + size for start, size in cuda.registered.items()), default=arena.address)
    assert end <= arena.address + arena.touched_slots * arena.slot_bytes


@given(
    slot_pages=st.integers(1, 5),
    num_slots=st.integers(1, 40),
    piece_bytes=st.integers(1, 12 * SLOT_BYTES),
    attached=st.booleans(),
)
@settings(max_examples=60)
def test_every_slot_is_pinned_once_and_in_one_piece(
    slot_pages: int, num_slots: int, piece_bytes: int, attached: bool
) -> None:
    slot_bytes = slot_pages * 4096
    cuda = FakeCuda()
    with _arena(num_slots, slot_bytes) as arena, pytest.MonkeyPatch.context() as patch:
        patch.setattr(pinning, "PIECE_BYTES", piece_bytes)
        mapping: ArenaMapping = arena.shared_at.attach() if attached else arena
        pinner = ArenaPinner(mapping, cuda)
        assert pinner.wait(WAIT_S)
        end = mapping.address
        for address, size_bytes in sorted(cuda.registered.items()):
            assert address == end
            assert size_bytes % slot_bytes == 0
            assert size_bytes <= max(piece_bytes, slot_bytes)
            end += size_bytes
        assert end == mapping.address + num_slots * slot_bytes
        assert mapping.pinned_slots == num_slots
        pinner.close()
        mapping.close()


def test_a_terabyte_goes_in_pieces_that_drivers_take() -> None:
    mapping = _Untouchable(30 << 20, (1 << 40) // (30 << 20) + 1)
    cuda = FakeCuda()
    pinner = ArenaPinner(mapping, cuda)
    assert pinner.wait(WAIT_S)
    assert max(cuda.sizes) <= PIECE_BYTES <= 64 << 30
    assert sum(cuda.sizes) == mapping.slot_bytes * mapping.num_slots
    pinner.close()


def test_closing_unregisters_everything_and_may_be_repeated() -> None:
    cuda = FakeCuda()
    with _arena(8) as arena:
        pinner = ArenaPinner(arena, cuda)
        assert pinner.wait(WAIT_S)
        assert arena.pinned_slots == 8
        pinner.close()
        pinner.close()
        assert arena.pinned_slots == 0
    assert cuda.registered == {}


@pytest.mark.usefixtures("pieces_of_three")
def test_a_piece_counts_once_it_is_registered() -> None:
    cuda = FakeCuda()
    with _arena(8) as arena:
        cuda.hold.clear()
        pinner = ArenaPinner(arena, cuda)
        assert cuda.called.wait(WAIT_S)
        assert arena.pinned_slots == 0
        assert not pinner.wait(0)
        cuda.hold.set()
        assert pinner.wait(WAIT_S)
        assert cuda.sizes == [3 * SLOT_BYTES, 3 * SLOT_BYTES, 2 * SLOT_BYTES]
        pinner.close()


@pytest.mark.usefixtures("pieces_of_three")
def test_closing_waits_for_the_piece_under_way_and_no_other() -> None:
    cuda = FakeCuda()
    with _arena(300) as arena:
        cuda.hold.clear()
        pinner = ArenaPinner(arena, cuda)
        assert cuda.called.wait(WAIT_S)
        closing = threading.Thread(target=pinner.close)
        closing.start()
        assert pinner._closing.wait(WAIT_S)
        assert closing.is_alive()
        cuda.hold.set()
        closing.join(WAIT_S)
        assert cuda.sizes == [3 * SLOT_BYTES]
    assert cuda.registered == {}


@pytest.mark.usefixtures("pieces_of_three")
def test_an_arena_is_pinned_as_it_grows_and_never_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Semaphore(0)
    _populate_by_hand(monkeypatch, lambda start: gate.acquire())
    gate.release()  # the first slot, which the constructor waits for
    cuda = FakeCuda()
    with _arena(8) as arena:
        pinner = ArenaPinner(arena, cuda)
        for touched, pinned in ((2, 0), (3, 3), (5, 3), (6, 6)):
            while arena.touched_slots < touched:
                gate.release()
                assert arena.wait_touched(arena.touched_slots + 1, WAIT_S)
            _until(partial(_has_pinned, arena, pinned))
            _never_more_than_touched(arena, cuda)
        assert not pinner.wait(0)
        gate.release(2)
        assert pinner.wait(WAIT_S)
        assert arena.pinned_slots == 8
        pinner.close()


@pytest.mark.usefixtures("pieces_of_three")
def test_what_an_arena_has_when_no_more_will_come_is_pinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(start: int) -> None:
        if start >= 4 * SLOT_BYTES:
            raise OSError(errno.ENOSPC, "no memory")

    _populate_by_hand(monkeypatch, refuse)
    cuda = FakeCuda()
    with _arena(8) as arena:
        pinner = ArenaPinner(arena, cuda)
        assert pinner.wait(WAIT_S)
        assert cuda.sizes == [3 * SLOT_BYTES, SLOT_BYTES]
        assert arena.pinned_slots == 4
        pinner.close()
    assert cuda.registered == {}


@pytest.mark.usefixtures("pieces_of_three")
def test_closing_does_not_wait_for_an_arena_that_does_not_grow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = threading.Semaphore(1)
    _populate_by_hand(monkeypatch, lambda start: gate.acquire())
    cuda = FakeCuda()
    arena = SharedArena(SLOT_BYTES, 8)
    pinner = ArenaPinner(arena, cuda)
    pinner.close()
    assert arena.touched_slots == 1
    assert cuda.sizes == []
    gate.release(8)
    arena.close()


@pytest.mark.usefixtures("pieces_of_three")
@pytest.mark.parametrize("error", [None, RuntimeError("CUDA was forked")])
def test_a_refusal_is_said_once_and_the_slots_work_unpinned(
    error: RuntimeError | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    cuda = FakeCuda(refuse_from=2, error=error)
    with _arena(20) as arena, caplog.at_level(logging.WARNING):
        pinner = ArenaPinner(arena, cuda)
        assert pinner.wait(WAIT_S)
        assert arena.pinned_slots == 6
        arena.slot(19)[:] = b"x" * SLOT_BYTES
        pinner.close()
    assert cuda.registered == {}
    [record] = caplog.records
    meaning = "out of memory (2)" if error is None else "CUDA was forked"
    said = record.getMessage()
    assert f"{6 * SLOT_BYTES} of {20 * SLOT_BYTES} bytes of DRAM are pinned" in said
    assert f"refused {3 * SLOT_BYTES} bytes more: {meaning}" in said
    assert "RLIMIT_MEMLOCK is 8388608 bytes" in said
    assert "--ulimit memlock=-1" in said


def test_without_a_limit_on_locked_memory_none_is_blamed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    with _arena(2) as arena, caplog.at_level(logging.WARNING):
        pinner = ArenaPinner(arena, FakeCuda(refuse_from=0))
        assert pinner.wait(WAIT_S)
        pinner.close()
    assert caplog.records[0].getMessage().endswith("out of memory (2)")


@pytest.mark.usefixtures("pieces_of_three")
def test_cuda_is_only_asked_from_the_pinners_own_thread() -> None:
    cuda = FakeCuda(refuse_from=2)
    with _arena(20) as arena:
        pinner = ArenaPinner(arena, cuda)
        assert pinner.wait(WAIT_S)
        pinner.close()
    assert cuda.threads == {"rootcellar-pin"}
    assert "rootcellar-pin" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("pin", [True, False])
def test_a_store_pins_its_memory_unless_another_process_does(
    monkeypatch: pytest.MonkeyPatch, pin: bool
) -> None:
    cuda = FakeCuda()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(opening, "TorchRuntime", lambda device: cuda)
    with TieredStore(StoreConfig(dram_bytes=4 * CHUNK_BYTES, pin_dram=pin), NAMESPACE) as store:
        expected = 4 * CHUNK_BYTES * pin
        _until(lambda: store.stats()["dram"]["bytes_page_locked"] == expected)
    assert cuda.registered == {}
    assert sum(cuda.sizes) == expected


def test_a_store_that_may_not_pin_works_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(opening, "TorchRuntime", lambda device: FakeCuda(refuse_from=0))
    with (
        caplog.at_level(logging.WARNING),
        TieredStore(StoreConfig(dram_bytes=4 * CHUNK_BYTES), NAMESPACE) as store,
    ):
        _until(lambda: "are pinned" in caplog.text)
        assert store.stats()["dram"]["bytes_page_locked"] == 0


def test_a_store_asks_for_memory_near_the_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str | None, int | None]] = []

    def node(pci_address: str | None) -> int:
        asked.append((pci_address, None))
        return 0

    def prefer(node: int, address: int, size_bytes: int) -> None:
        asked.append((None, node))

    monkeypatch.setattr(opening, "gpu_node", node)
    monkeypatch.setattr(opening, "current_pci_address", lambda: "0000:17:00.0")
    monkeypatch.setattr(arena_module, "prefer_node", prefer)
    with TieredStore(StoreConfig(dram_bytes=4 * CHUNK_BYTES), NAMESPACE):
        assert asked == [("0000:17:00.0", None), (None, 0)]


def _has_pinned(arena: SharedArena, num_slots: int) -> bool:
    return arena.pinned_slots == num_slots


class _Untouchable(ArenaMapping):
    """A mapping larger than any machine: its memory is reserved, and nobody touches it."""

    def __init__(self, slot_bytes: int, num_slots: int) -> None:
        self._fd = os.memfd_create("test")
        os.ftruncate(self._fd, slot_bytes * num_slots)
        super().__init__(self._fd, slot_bytes, num_slots)
        os.close(self._fd)


def _populate_by_hand(monkeypatch: pytest.MonkeyPatch, allow: Callable[[int], object]) -> None:
    """One slot at a time, each once allow(its first byte) returns."""

    def allocate(fd: int, start: int, size_bytes: int) -> None:
        allow(start)

    monkeypatch.setattr(arena_module, "_MADV_POPULATE_WRITE", 4242)  # unknown to any kernel
    monkeypatch.setattr(arena_module, "STEP_BYTES", SLOT_BYTES)
    monkeypatch.setattr(os, "posix_fallocate", allocate)


def _until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.001)
