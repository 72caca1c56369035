"""What of this machine the store can use, what holds it back, and what to change.

Changes nothing: the one file the disk probe writes loses its name before its first byte, so it is
gone however the program ends.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import platform
import re
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..tiers.arena import SharedArena
from ..tiers.cuda_runtime import (
    MEMLOCK_CURE,
    CudaRuntime,
    TorchRuntime,
    current_device,
    current_pci_address,
)
from ..tiers.gpu_file import unusable
from ..tiers.numa import gpu_node

PROBE_S = 2.0
COPY_BYTES = 64 << 20
BLOCK_BYTES = 4 << 20
LANES = 4
LANE_BYTES = 64 << 20
"""Each lane goes round in its own part of the file: the probe takes LANES of these on disk."""

_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python's mmap has no name for it
_SHMEM_HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_MEMINFO = Path("/proc/meminfo")
_STYLES = {"ok": "green", "warn": "yellow", "bad": "red"}


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"
    """Works, but slower or smaller than this machine could."""
    BAD = "bad"
    """The store cannot work with this."""


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. advice: what to change, empty where nothing needs to be."""

    name: str
    status: Status
    value: str
    advice: str = ""


def run(directory: Path, probe_s: float = PROBE_S) -> dict[str, Any]:
    """Every check, on this machine and `directory`; about probe_s seconds of it measures.

    Returns {"directory", "checks": [{"name", "status", "value", "advice"}], "num_warn", "num_bad"}.
    ValueError if `directory` is none.
    """
    if not directory.is_dir():
        raise ValueError(f"directory is {directory}, must be an existing directory")
    checks = [
        _python(),
        _torch(),
        *_cuda(),
        _shmem_huge_pages(),
        _hugetlb(),
        _populate(),
        _memory_speed(probe_s / 2),
        *_directory(directory, probe_s / 4),
    ]
    return {
        "directory": str(directory.resolve()),
        "checks": [asdict(check) for check in checks],
        "num_warn": sum(check.status is Status.WARN for check in checks),
        "num_bad": sum(check.status is Status.BAD for check in checks),
    }


def table(result: dict[str, Any]) -> Group:
    """The findings as a table; what to change below it, where no column breaks a command."""
    shown = Table("", "check", "found")
    for check in result["checks"]:
        mark = Text(check["status"], _STYLES[check["status"]])
        shown.add_row(mark, check["name"], Text(check["value"]))
    changes = [
        Text.assemble((f"{check['name']}: ", "bold"), check["advice"])
        for check in result["checks"]
        if check["advice"]
    ]
    return Group(Text(f"This machine, and {result['directory']}"), shown, *changes)


def _python() -> Check:
    return Check("python", Status.OK, platform.python_version())


def _torch() -> Check:
    return Check("torch", Status.OK, torch.__version__)


def _cuda() -> Iterator[Check]:
    """The checks that only matter with a GPU are OK without one."""
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        yield Check("cuda", Status.OK, f"{torch.version.cuda}: {', '.join(names)}")
        yield _cupy(Status.WARN)
        yield _memlock(Status.WARN)
        yield _pinning(TorchRuntime(current_device()))
        yield _gpu_node(current_pci_address())
        yield _direct_reads(unusable(current_device()))
        return
    advice = "to use a GPU: a driver that nvidia-smi sees and a torch built with CUDA"
    yield Check("cuda", Status.WARN, f"no device (torch CUDA: {torch.version.cuda})", advice)
    yield _cupy(Status.OK)
    yield _memlock(Status.OK)
    yield Check("pinned DRAM", Status.OK, "without a GPU, nothing to pin for")
    yield _gpu_node(None)
    yield _direct_reads("without a GPU, nothing to read into")


def _cupy(when_missing: Status) -> Check:
    names = [f"{d.name} {d.version}" for d in metadata.distributions() if "cupy" in str(d.name)]
    if names:
        return Check("cupy", Status.OK, ", ".join(names))
    advice = f"pip install 'rootcellar[cuda{(torch.version.cuda or '12').partition('.')[0]}]'"
    return Check("cupy", when_missing, "not installed", _unless_ok(when_missing, advice))


def _memlock(when_limited: Status) -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Check("memlock limit", Status.OK, "unlimited")
    advice = f"pinning DRAM may need more: {MEMLOCK_CURE}"
    return Check("memlock limit", when_limited, _size(soft), _unless_ok(when_limited, advice))


def _pinning(cuda: CudaRuntime) -> Check:
    """Tries it on memory such as the DRAM tier's; a driver may still refuse more than that."""
    arena = SharedArena(COPY_BYTES, 1)
    try:
        code = cuda.register(arena.address, COPY_BYTES)
        if code == 0:
            cuda.unregister(arena.address)
            return Check("pinned DRAM", Status.OK, f"yes, {_size(COPY_BYTES)} tried")
        why = cuda.describe(code)
    except RuntimeError as error:
        why = str(error)
    finally:
        arena.close()
    advice = "copies to and from DRAM are slower; see the memlock limit and the driver's log"
    return Check("pinned DRAM", Status.WARN, f"{_size(COPY_BYTES)} refused: {why}", advice)


def _gpu_node(pci_address: str | None) -> Check:
    """Information only: the store asks for memory there, and does without where it is not known."""
    node = gpu_node(pci_address)
    value = "no preference: unknown, or several" if node is None else str(node)
    return Check("NUMA node of the GPU", Status.OK, value)


def _direct_reads(why_not: str) -> Check:
    """Information only: the store measures for itself whether they are faster."""
    return Check("NVMe straight to the GPU", Status.OK, why_not or "possible")


def _unless_ok(status: Status, advice: str) -> str:
    return "" if status is Status.OK else advice


def _shmem_huge_pages() -> Check:
    mode = re.search(r"\[(\w+)\]", _read(_SHMEM_HUGE))
    if mode is None:
        return Check(
            "shmem huge pages", Status.WARN, "not in this kernel", "small copies are slower"
        )
    if mode[1] in ("always", "within_size", "advise", "force"):
        return Check("shmem huge pages", Status.OK, mode[1])
    advice = f"copies of small pages gain from: echo advise > {_SHMEM_HUGE}"
    return Check("shmem huge pages", Status.WARN, mode[1], advice)


def _hugetlb() -> Check:
    """Information only: nothing of the store needs reserved huge pages."""
    meminfo = dict(re.findall(r"^(\w+):\s+(\d+)", _read(_MEMINFO), re.M))
    total, free = meminfo.get("HugePages_Total", "0"), meminfo.get("HugePages_Free", "0")
    page = _size(int(meminfo.get("Hugepagesize", "0")) * 1024)
    return Check("hugetlb pages", Status.OK, f"{free} free of {total}, {page} each")


def _populate() -> Check:
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            page.madvise(_MADV_POPULATE_WRITE)
        except OSError:
            advice = "Linux 5.14 or newer fills the DRAM tier faster after a start"
            return Check("MADV_POPULATE_WRITE", Status.WARN, platform.release(), advice)
    return Check("MADV_POPULATE_WRITE", Status.OK, platform.release())


def _memory_speed(probe_s: float) -> Check:
    """One thread's memcpy between buffers larger than a cache; the best of what fits in probe_s."""
    source, target = (np.ones(COPY_BYTES, np.uint8) for _ in range(2))
    best_s, end_s = math.inf, time.perf_counter() + probe_s
    while best_s == math.inf or time.perf_counter() < end_s:
        start_s = time.perf_counter()
        target[:] = source
        best_s = min(best_s, time.perf_counter() - start_s)
    return Check("memory bandwidth", Status.OK, f"{_rate(COPY_BYTES / best_s)} copied")


def _directory(directory: Path, probe_s: float) -> Iterator[Check]:
    room = _free_space(directory)
    yield room
    try:
        with _nameless_file(directory) as fd:
            direct = _bypass_page_cache(fd)
            yield _o_direct(direct)
            if room.status is Status.OK:
                yield from _disk_speed(fd, direct, probe_s)
    except OSError as error:
        advice = "the store needs a directory of a local drive that it can write"
        yield Check("directory", Status.BAD, error.strerror or str(error), advice)


def _free_space(directory: Path) -> Check:
    usage = shutil.disk_usage(directory)
    value = f"{_size(usage.free)} of {_size(usage.total)}"
    if usage.free >= 2 * LANES * LANE_BYTES:
        return Check("free space", Status.OK, value)
    return Check("free space", Status.BAD, value, "make room, or name another drive")


@contextmanager
def _nameless_file(directory: Path) -> Iterator[int]:
    """Descriptor of a file in `directory` that is gone when the descriptor is."""
    fd, name = tempfile.mkstemp(prefix=".rootcellar-doctor-", dir=directory)
    try:
        os.unlink(name)
        yield fd
    finally:
        os.close(fd)


def _bypass_page_cache(fd: int) -> bool:
    """Put the descriptor into O_DIRECT mode; False where the file system has none."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True


def _o_direct(direct: bool) -> Check:
    if direct:
        return Check("O_DIRECT", Status.OK, "yes")
    advice = "use ext4 or xfs on a local drive: here, reads and writes go through the page cache"
    return Check("O_DIRECT", Status.WARN, "no", advice)


def _disk_speed(fd: int, direct: bool, probe_s: float) -> Iterator[Check]:
    written = _lanes_speed(lambda block, at: os.pwrite(fd, block, at), probe_s)
    if not direct:
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    read = _lanes_speed(lambda block, at: os.preadv(fd, [block], at), probe_s)
    how = f"{LANES} lanes, O_DIRECT" if direct else f"{LANES} lanes, page cache"
    yield Check("disk write", Status.OK, f"{_rate(written)} ({how}, new file)")
    yield Check("disk read", Status.OK, f"{_rate(read)} ({how})")


def _lanes_speed(move: Callable[[mmap.mmap, int], int], probe_s: float) -> float:
    """Bytes per second of LANES threads that each go round in their part of the file."""
    start_s = time.perf_counter()
    end_s = start_s + probe_s

    def lane(number: int) -> int:
        moved = 0
        with mmap.mmap(-1, BLOCK_BYTES) as block:  # page-aligned, as O_DIRECT wants it
            while moved == 0 or time.perf_counter() < end_s:
                moved += move(block, number * LANE_BYTES + moved % LANE_BYTES)
        return moved

    with ThreadPoolExecutor(LANES) as pool:
        total = sum(pool.map(lane, range(LANES)))
    return total / (time.perf_counter() - start_s)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _size(num_bytes: int) -> str:
    size, units = float(num_bytes), iter(("B", "KiB", "MiB", "GiB"))
    for unit in units:
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"
