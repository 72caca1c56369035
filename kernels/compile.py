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
    """The kernel `name` of csrc/`source`, for that device; each source is compiled once a process.

    ImportError says what to install, or to set. What CuPy raises for a broken driver or compiler is
    passed on.
    """
    return _module(source, device_index).get_function(name)


def import_cupy() -> Any:
    """ImportError names the extra that fits this torch, or what else keeps CuPy from starting."""
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        extra = f"cuda{(torch.version.cuda or '13').split('.')[0]}"
        raise ImportError(
            f"copies on a GPU need CuPy: pip install 'rootcellar[{extra}]'"
        ) from error
    except OSError as error:
        raise ImportError(
            f"CuPy makes a folder for its own kernels ({error}): set CUPY_CACHE_DIR to one that"
            " can be written"
        ) from error


def source_text(source: str) -> str:
    """csrc/`source` with our headers in place of their #include lines, each once.

    One text: a compiler that is given it finds everything in it.
    """
    return _expanded(CSRC / source, set())


@cache
def _module(source: str, device_index: int) -> Any:
    # Not by CuPy's RawModule, which adds an option that makes small floats zero.
    cupy = import_cupy()
    with cupy.cuda.Device(device_index):
        compiled, _ = cupy.cuda.compiler.compile_using_nvrtc(
            source_text(source), OPTIONS, cache_in_memory=True
        )
        module = cupy.cuda.Module()
        module.load(compiled)
        return module


def _expanded(path: Path, seen: set[Path]) -> str:
    if path in seen:
        return ""
    seen.add(path)
    text = path.read_text().replace("#pragma once\n", "")
    return re.sub(
        r'^#include "(.+)"$', lambda found: _expanded(CSRC / found[1], seen), text, flags=re.M
    )
