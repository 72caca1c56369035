"""Which device this is, and what is missing where there is none to measure."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..tiers.cuda_runtime import current_pci_address
from ..tiers.dma import BatchCopy
from ..tiers.numa import gpu_node
from .timing import environment

_NODES = Path("/sys/devices/system/node")
_QUERY = (
    "driver_version",
    "pcie.link.gen.max",
    "pcie.link.width.max",
    "power.limit",
    "ecc.mode.current",
)
_cuda: Any = torch.cuda  # which is typed in parts only


def device_to_measure(*, dry_run: bool) -> torch.device:
    """The CPU for a dry run, else the current GPU. ValueError says what is missing for that."""
    if dry_run:
        return torch.device("cpu")
    missing = _missing()
    if missing:
        raise ValueError(f"{missing}; --dry-run goes through every section on the CPU")
    return torch.device("cuda", _cuda.current_device())


def facts(device: torch.device) -> dict[str, Any]:
    """Of the machine and, where it is one, the GPU, for the JSON document."""
    found = environment() | {"rootcellar": __version__, "torch_cuda": torch.version.cuda}
    if device.type == "cpu":
        return found | {"device": "cpu"}
    properties = _cuda.get_device_properties(device)
    return found | {
        "device": properties.name,
        "device_memory_bytes": properties.total_memory,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "cupy": _cupy_version(),
        "pci_address": (pci_address := current_pci_address()),
        "numa_node": gpu_node(pci_address),
        "numa_nodes": len(list(_NODES.glob("node[0-9]*"))),
        "batched_copies": BatchCopy.find() is not None,
        "nvidia_smi": _nvidia_smi(pci_address),
    }


def _missing() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA: install one with it"
    if not torch.cuda.is_available():
        return "no CUDA device: needs a driver and a GPU that nvidia-smi shows"
    if importlib.util.find_spec("cupy") is None:
        extra = f"cuda{torch.version.cuda.partition('.')[0]}"
        return f"CuPy is not installed: pip install 'rootcellar[{extra}]'"
    return ""


def _cupy_version() -> str | None:
    found = (d for d in metadata.distributions() if "cupy" in str(d.name))
    return next((f"{d.name} {d.version}" for d in found), None)


def _nvidia_smi(pci_address: str | None) -> dict[str, str]:
    """What only the driver's own tool tells; empty where it does not."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    command = [program, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader"]
    if pci_address is not None:
        command.append(f"--id={pci_address}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = done.stdout.partition("\n")[0].split(",")
    return dict(zip(_QUERY, map(str.strip, values), strict=False))
