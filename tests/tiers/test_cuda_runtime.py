import ctypes
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rootcellar.tiers import cuda_runtime
from rootcellar.tiers.arena import SharedArena
from rootcellar.tiers.cuda_runtime import (
    MEMLOCK_CURE,
    TorchRuntime,
    current_device,
    current_pci_address,
    memlock_hint,
)

RELAXED = 2


class FakeTorch:
    """torch.cuda and the driver below it: what is asked, on which device and in which mode."""

    def __init__(self) -> None:
        self.mode = 0
        self.on: torch.device | None = None
        self.error: RuntimeError | None = None
        self.asked: list[tuple[Any, ...]] = []

    def cudart(self) -> "FakeTorch":
        return self

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.on = device
        yield
        self.on = None

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        self.asked.append(("register", address, size_bytes, flags, self.on, self.mode))
        if self.error is not None:
            raise self.error
        return 2

    def cudaHostUnregister(self, address: int) -> int:
        self.asked.append(("unregister", address, self.on, self.mode))
        return 713

    def exchange(self, mode: ctypes.c_int) -> None:
        self.mode, mode.value = mode.value, self.mode


DEVICE = torch.device("cuda", 3)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    fake = FakeTorch()
    monkeypatch.setattr(cuda_runtime, "_cuda", fake)
    monkeypatch.setattr(cuda_runtime, "_exchange_capture_mode", fake.exchange)
    return fake


def test_memory_is_locked_for_all_devices_on_the_one_that_is_ours(fake: FakeTorch) -> None:
    runtime = TorchRuntime(DEVICE)
    assert runtime.register(4096, 8192) == 2
    assert runtime.unregister(4096) == 713
    assert fake.asked == [
        ("register", 4096, 8192, 1, DEVICE, RELAXED),
        ("unregister", 4096, DEVICE, RELAXED),
    ]
    assert fake.on is None


@pytest.mark.parametrize("error", [None, RuntimeError("no")])
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_a_thread_has_its_capture_mode_back_after_every_call(
    fake: FakeTorch, mode: int, error: RuntimeError | None
) -> None:
    fake.mode, fake.error = mode, error
    with suppress(RuntimeError):
        TorchRuntime(DEVICE).register(4096, 4096)
    assert fake.asked[0][-1] == RELAXED
    assert fake.mode == mode


def test_without_a_driver_there_is_no_capture_mode_to_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> None:
        assert name == "libcuda.so.1"
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    mode = ctypes.c_int(RELAXED)
    cuda_runtime._exchange_capture_mode(mode)
    assert mode.value == RELAXED


def test_the_driver_swaps_the_mode_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def swap(pointer: Any) -> int:
        pointer._obj.value = 1
        return 0

    driver = SimpleNamespace(cuThreadExchangeStreamCaptureMode=swap)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: driver)
    mode = ctypes.c_int(RELAXED)
    cuda_runtime._exchange_capture_mode(mode)
    assert mode.value == 1


def test_the_current_device_is_told_without_initialising_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert current_device() == torch.device("cuda", 0)
    assert current_pci_address() is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert current_device() == torch.device("cuda", 5)


@pytest.mark.parametrize(
    ("properties", "address"),
    [
        ({"pci_domain_id": 0, "pci_bus_id": 0xCA, "pci_device_id": 0}, "0000:ca:00.0"),
        ({"pci_domain_id": 0x10000, "pci_bus_id": 1, "pci_device_id": 0x1F}, "10000:01:1f.0"),
        ({}, None),  # an older torch
    ],
)
def test_a_device_sits_where_sysfs_names_it(
    properties: dict[str, int], address: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def tell(device: int) -> SimpleNamespace:
        asked.append(device)
        return SimpleNamespace(**properties)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(torch.cuda, "get_device_properties", tell)
    assert current_pci_address() == address
    assert asked == [5]


def test_a_limit_on_locked_memory_is_named_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 16 << 20))
    assert memlock_hint() == f"RLIMIT_MEMLOCK is 8388608 bytes, raise it: {MEMLOCK_CURE}"
    assert "docker run --ulimit memlock=-1" in MEMLOCK_CURE
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert memlock_hint() == ""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpu_locks_an_arena_while_a_graph_is_captured() -> None:
    runtime, arena = TorchRuntime(current_device()), SharedArena(4096, 8)
    source = torch.ones(64, device="cuda")
    slots = torch.frombuffer(arena.buffer, dtype=torch.uint8)
    graph = torch.cuda.CUDAGraph()
    with ThreadPoolExecutor(1) as other:
        with torch.cuda.graph(graph, capture_error_mode="global"):
            doubled = source * 2
            assert other.submit(runtime.register, arena.address, 8 * 4096).result() == 0
        graph.replay()
        assert doubled.sum().item() == 128
        assert slots.is_pinned()
        again = other.submit(runtime.register, arena.address, 4096).result()
        assert f"({again})" in runtime.describe(again) != runtime.describe(0)
        assert other.submit(runtime.unregister, arena.address).result() == 0
    assert not slots.is_pinned()
    del slots
    arena.close()
