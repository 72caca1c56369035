"""What pinning and placing the arena ask of CUDA, and torch's answer to it."""

import ctypes
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

MEMLOCK_CURE = (
    "ulimit -l unlimited, LimitMEMLOCK=infinity in a systemd unit, or docker run"
    " --ulimit memlock=-1"
)

_cuda: Any = torch.cuda  # which is typed in parts only
_PORTABLE = 1  # pinned for every CUDA context of the process, whatever its device
_RELAXED = 2


class CudaRuntime(Protocol):
    """Whoever registers memory unregisters it, in the same thread: CUDA keeps the error of a call
    for its thread, and the next launch there would report it as its own."""

    def register(self, address: int, size_bytes: int, /) -> int:
        """Page-lock memory for all devices; 0, or CUDA's error code.

        Memory that was not touched yet is populated, so it may take as long as that. RuntimeError
        where this process cannot have CUDA.
        """
        ...

    def unregister(self, address: int, /) -> int:
        """Undo the register() of this address; 0, or CUDA's error code."""
        ...

    def describe(self, code: int, /) -> str:
        """An error code and its meaning."""
        ...


class TorchRuntime:
    """May be made before CUDA is initialised, and initialises it when it is first asked."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, size_bytes: int, /) -> int:
        cudart = _cuda.cudart()
        # A new thread is on device 0, which may be another process's: no context is made there.
        with _cuda.device(self._device), _relaxed_capture():
            return int(cudart.cudaHostRegister(address, size_bytes, _PORTABLE))

    def unregister(self, address: int, /) -> int:
        cudart = _cuda.cudart()
        with _cuda.device(self._device), _relaxed_capture():
            return int(cudart.cudaHostUnregister(address))

    def describe(self, code: int, /) -> str:
        return str(torch.cuda.CudaError(code))


def current_device() -> torch.device:
    """The calling thread's CUDA device, without initialising CUDA for it."""
    return torch.device("cuda", _cuda.current_device() if _cuda.is_initialized() else 0)


def current_pci_address() -> str | None:
    """Where the calling thread's device sits, as sysfs names it; None before CUDA is initialised,
    and from a torch that does not tell."""
    if not _cuda.is_initialized():
        return None
    device = _cuda.get_device_properties(_cuda.current_device())
    if not hasattr(device, "pci_bus_id"):
        return None
    return f"{device.pci_domain_id:04x}:{device.pci_bus_id:02x}:{device.pci_device_id:02x}.0"


def memlock_hint() -> str:
    """What to change when memory could not be locked; empty where the process has no limit."""
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit_bytes == resource.RLIM_INFINITY:
        return ""
    return f"RLIMIT_MEMLOCK is {limit_bytes} bytes, raise it: {MEMLOCK_CURE}"


@contextmanager
def _relaxed_capture() -> Iterator[None]:
    """Lets this thread lock memory while another captures a CUDA graph, as an engine does when it
    starts: in the mode that threads begin in, a call that CUDA holds unsafe breaks that capture."""
    mode = ctypes.c_int(_RELAXED)
    _exchange_capture_mode(mode)
    try:
        yield
    finally:
        _exchange_capture_mode(mode)  # which now holds what the thread had


def _exchange_capture_mode(mode: ctypes.c_int) -> None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return  # not NVIDIA's CUDA: there is no such mode
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
