"""csrc/*.cu as functions to launch, compiled for the device at hand by CuPy (NVRTC).

CuPy is only imported here, and only where there is CUDA.
"""

import importlib
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch

CSRC = Path(__file__).parent / "csrc"

OPTIONS = ("-std=c++17", "--fmad=false")
"""Products are rounded before sums, as on the CPU: quantised bytes must not depend on where."""


@cache
def kernel(source: str, name: str, device_index: int) -> Any:
    """The kernel `name` of csrc/`source`, for that device; compiled once per machine.

    ImportError says what to install. What CuPy raises for a broken driver or compiler is passed on.
    """
    cupy = import_cupy()
    with cupy.cuda.Device(device_index):
        module = cupy.RawModule(code=source_text(source), options=OPTIONS)
        return module.get_function(name)


def import_cupy() -> Any:
    """ImportError names the extra that fits this torch."""
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        extra = f"cuda{(torch.version.cuda or '13').split('.')[0]}"
        raise ImportError(
            f"copies on a GPU need CuPy: pip install 'rootcellar[{extra}]'"
        ) from error


def source_text(source: str) -> str:
    """csrc/`source` with our headers in place of their #include lines, each once.

    One text, since the key of CuPy's cache on disk is made of the text alone: a changed header
    would go unnoticed.
    """
    return _expanded(CSRC / source, set())


def _expanded(path: Path, seen: set[Path]) -> str:
    if path in seen:
        return ""
    seen.add(path)
    text = path.read_text().replace("#pragma once\n", "")
    return re.sub(
        r'^#include "(.+)"$', lambda found: _expanded(CSRC / found[1], seen), text, flags=re.M
    )
