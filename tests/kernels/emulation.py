"""Runs csrc/*.cu on the CPU: g++ compiles them behind emulation.h, ctypes calls them.

All kernels take 64-bit integers and pointers only, so one way of calling serves them all.
"""

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

CSRC = Path(__file__).parents[2] / "kernels" / "csrc"
SHIM = Path(__file__).with_suffix(".h")
FLAGS = [
    *("-std=c++17", "-O1", "-fPIC", "-shared", "-fno-strict-aliasing", "-ffp-contract=off"),
    *("-Wall", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-function"),
]
MOST_ARGS = 16
GUARD_BYTES = 4096
GUARD = 0xA5


class Emulated:
    """The kernels of one source file, callable as on a GPU but in one thread."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def launch(self, kernel: str, grid: int, block: int, *args: int) -> None:
        """args: 64-bit, addresses or numbers. Fails if part of a block misses a __syncthreads."""
        assert len(args) <= MOST_ARGS
        values = (ctypes.c_uint64 * MOST_ARGS)(*args)
        launch, pointer = self._library.emulated_launch, self._library[kernel]
        error = launch(pointer, ctypes.c_uint(grid), ctypes.c_uint(block), values, len(args))
        assert error == 0, f"{kernel}: some threads of a block ended while others waited for them"


@cache
def emulated(source: str) -> Emulated:
    """source: a file of csrc/, "copy.cu". Skips the test where there is no g++."""
    return compiled(CSRC / source)


def compiled(source: Path) -> Emulated:
    """Compiles `source` with the headers of csrc/, which may differ from those of the package."""
    if not shutil.which("g++"):
        pytest.skip("needs g++ to run kernels on the CPU")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "kernels.so"
        command = ["g++", *FLAGS, "-include", str(SHIM), "-I", str(CSRC), "-o", str(library)]
        ran = subprocess.run([*command, "-x", "c++", str(source)], capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        return Emulated(ctypes.CDLL(str(library)))


class Guarded:
    """Memory whose surroundings nobody may write.

    array: num_bytes zeros, at `address`, `misalign` bytes behind a multiple of 256.
    """

    def __init__(self, num_bytes: int, misalign: int = 0) -> None:
        self._whole = np.full(num_bytes + 2 * GUARD_BYTES + 256, GUARD, np.uint8)
        self._start = GUARD_BYTES + (misalign - self._whole.ctypes.data) % 256
        self._stop = self._start + num_bytes
        self.array: npt.NDArray[np.uint8] = self._whole[self._start : self._stop]
        self.array[:] = 0
        self.address = int(self._whole.ctypes.data) + self._start

    def check(self) -> None:
        """Fails if a byte before or behind `array` was written."""
        (before,) = (self._whole[: self._start] != GUARD).nonzero()
        (behind,) = (self._whole[self._stop :] != GUARD).nonzero()
        assert not len(before), f"wrote {self._start - int(before[-1])} bytes before the memory"
        assert not len(behind), f"wrote byte {int(behind[0])} behind the memory"
