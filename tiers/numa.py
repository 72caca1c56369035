"""The memory node nearest to the GPU, and the wish that a mapping's memory comes from there.

On a machine with several sockets, a copy from the other one's memory crosses the link between them.
"""

import ctypes
import logging
import os
import platform
from collections.abc import Iterator
from pathlib import Path

PCI_DEVICES = Path("/sys/bus/pci/devices")

_NVIDIA = "0x10de"
_GPU_CLASSES = ("0x0300", "0x0302")  # with a display, and without
_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_PREFERRED = 1
_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)

_log = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)


def gpu_node(pci_address: str | None, devices: Path = PCI_DEVICES) -> int | None:
    """The node of the GPU at this PCI address; without one, of all NVIDIA GPUs of the machine.

    None for no preference: the kernel does not know, or the GPUs are on several nodes.
    """
    gpus = _nvidia_gpus(devices) if pci_address is None else [devices / pci_address]
    nodes = {_node(gpu) for gpu in gpus}
    node = nodes.pop() if len(nodes) == 1 else None
    return node if node is not None and node >= 0 else None  # -1: the firmware does not tell


def prefer_node(node: int, address: int, size_bytes: int) -> None:
    """Ask for memory of `node`, from others when it has none, for pages not touched yet.

    On shared memory the kernel keeps the wish with the file: it holds for the faults of every
    process that maps it. A kernel or a sandbox that refuses it is ignored.
    """
    words = node // _BITS + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // _BITS] = 1 << node % _BITS
    arguments = address, size_bytes, _MPOL_PREFERRED, ctypes.addressof(mask), words * _BITS + 1, 0
    if (number := _MBIND.get(platform.machine())) is None:
        _log.debug("memory is not placed near the GPU: no mbind known for %s", platform.machine())
    elif _libc.syscall(*map(ctypes.c_long, (number, *arguments))) != 0:
        why = os.strerror(ctypes.get_errno())
        _log.debug("memory is not placed near the GPU, on node %d: %s", node, why)


def _nvidia_gpus(devices: Path) -> Iterator[Path]:
    for device in devices.iterdir() if devices.is_dir() else ():
        vendor, kind = _read(device / "vendor"), _read(device / "class")
        if vendor == _NVIDIA and kind.startswith(_GPU_CLASSES):
            yield device


def _node(device: Path) -> int | None:
    text = _read(device / "numa_node")
    return int(text) if text else None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
