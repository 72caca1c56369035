"""Chunk files read straight into GPU memory by kvikio, where that beats the way through DRAM.

Both ways are measured once, in turn, on a file of a chunk's size beside the store's own.
"""

import os
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
import xxhash

from ..kernels.xxh3 import xxh3_128
from .chunk_file import TMP
from .device import Stream, device_of
from .gpu_direct import Reader

AT_ONCE = 4
"""Files in flight, either way."""
_ROUNDS = 7
_FASTER = 1.1
"""So many times as fast it must be: it takes GPU memory, and its reads warm no DRAM."""

Way = Callable[[Path], Sequence[bytes]]
"""Bring a file into device memory, AT_ONCE times; the digests of what is there when it returns."""


@dataclass(frozen=True, slots=True)
class Choice:
    """reader: whoever asked owns it; None where files had better go through DRAM. why: for people,
    either way."""

    reader: Reader | None
    why: str


class GpuFiles:
    """A Reader with threads of its own: kvikio's pool is the whole process's, and to hand it a read
    blocks until the device's default stream is idle."""

    def __init__(self, device: torch.device) -> None:
        # An extra, asked for only where there is CUDA.
        self._open: Any = import_module("kvikio").CuFile
        begin: Any = torch.cuda.set_device  # kvikio reads in the context of the thread
        self._threads = ThreadPoolExecutor(AT_ONCE, "rootcellar-gds", begin, (device,))

    def read(self, path: str, target: torch.Tensor) -> Future[int]:
        try:
            return self._threads.submit(self._read, path, target)
        except RuntimeError as error:  # no more threads, or the interpreter is ending
            failed = Future[int]()
            failed.set_exception(error)
            return failed

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    def _read(self, path: str, target: torch.Tensor) -> int:
        try:
            with self._open(path) as file:
                return int(file.raw_read(target))
        except Exception:
            os.stat(path)  # FileNotFoundError, which kvikio does not tell from any other
            raise


def choose(root: Path, device: torch.device, file_bytes: int) -> Choice:
    """How to read chunk files of that size, below a store's directory, for KV on `device`. Takes
    a moment, and AT_ONCE files of GPU memory meanwhile."""
    if why_not := unusable(device):
        return Choice(None, why_not)
    reader = GpuFiles(device)
    try:
        stream = device_of([torch.empty(0, device=device)]).stream(urgent=True)
        rows = stream.empty(AT_ONCE * file_bytes).view(AT_ONCE, file_bytes)
        stream.record().synchronize()  # what used this memory before is done with it
        ways = direct_way(reader, rows, stream), dram_way(rows, stream, os.O_DIRECT)
        times_as_fast = compare(root, file_bytes, *ways)
        why = f"measured {times_as_fast:.2f} times as fast as through DRAM"
        if times_as_fast >= _FASTER:
            return Choice(reader, why)
    except Exception as error:
        why = f"it cannot be measured: {error}"
    reader.close()
    return Choice(None, why)


def unusable(device: torch.device) -> str:
    """Why files cannot be read straight into memory of `device`; empty where they can."""
    if device.type != "cuda":
        return f"the KV cache is on {device.type}"
    try:
        driver, defaults = (import_module(f"kvikio.{n}") for n in ("cufile_driver", "defaults"))
    except Exception as error:  # it looks for libraries of CUDA when it is imported
        return f"kvikio cannot be imported: {error}"
    if defaults.is_compat_mode_preferred() or not driver.get("is_gds_available"):
        return "kvikio is in compatibility mode: it would read through DRAM, too"
    return ""


def compare(
    root: Path,
    file_bytes: int,
    direct: Way,
    dram: Way,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """How many times as fast `direct` is. OSError if either brings other bytes than were written,
    and whatever either raises; nothing is left behind."""
    probe = root / TMP / f"probe-{uuid.uuid4().hex}"  # swept, should this process die on the way
    direct_s, dram_s = list[float](), list[float]()
    try:
        digest = _write(probe, file_bytes)
        for _ in range(_ROUNDS):  # in turn: a drive that slows down slows both
            for way, taken_s in ((direct, direct_s), (dram, dram_s)):
                began_s = clock()
                found = way(probe)
                taken_s.append(clock() - began_s)
                if {*found} != {digest}:
                    raise OSError("what is read is not what was written")
    finally:
        probe.unlink(missing_ok=True)
    return median(dram_s) / median(direct_s)


def direct_way(reader: Reader, rows: torch.Tensor, stream: Stream) -> Way:
    def bring(path: Path) -> list[bytes]:
        for read in [reader.read(str(path), row) for row in rows]:
            read.result()
        digests = list[torch.Tensor]()
        stream.run(lambda: digests.append(xxh3_128(rows)))
        stream.record().synchronize()
        return [digest.numpy().tobytes() for digest in digests[0].cpu()]

    return bring


def dram_way(rows: torch.Tensor, stream: Stream, o_direct: int) -> Way:
    slots = torch.empty(rows.shape, dtype=torch.uint8, pin_memory=rows.is_cuda)

    def bring(path: Path) -> list[bytes]:
        digests = list[bytes]()
        with ThreadPoolExecutor(len(rows)) as threads:
            reads = threads.map(partial(_read_slot, path, os.O_RDONLY | o_direct), slots)
            for row, slot, digest in zip(rows, slots, reads, strict=True):
                stream.run(partial(_copy, row, slot))
                digests.append(digest)
        stream.record().synchronize()
        return digests

    return bring


def _read_slot(path: Path, flags: int, slot: torch.Tensor) -> bytes:
    """The digest of what it read."""
    fd, memory = os.open(path, flags), cast(Any, slot.numpy())
    try:
        os.preadv(fd, [memory], 0)
    finally:
        os.close(fd)
    return xxhash.xxh3_128_digest(memory)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _write(path: Path, num_bytes: int) -> bytes:
    """The digest of what it wrote."""
    content = os.urandom(num_bytes)
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # so that no read has to write it first
    return xxhash.xxh3_128_digest(content)
