"""What a store is told when it opens. Everything is checked before anything is touched."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ..admission.base import AdmissionPolicy
from ..admission.choices import POLICIES, make
from .base import WriteDown
from .io.base import Codec

IoKind = Literal["process", "threads"]
CodecName = Literal["raw", "zstd"]

CODECS: dict[str, Codec] = {"raw": Codec.RAW, "zstd": Codec.ZSTD_PLANES}

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{p}iB": 1024**n for n, p in enumerate("KMGTP", 1)}
_UNITS |= {f"{p}B": 1000**n for n, p in enumerate("KMGTP", 1)}


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreConfig:
    """Budgets and behaviour of one TieredStore. Sizes are bytes, or strings such as "64GiB".

    dram_bytes: DRAM for chunks, at least one chunk; allocated in the background when it opens.
    pin_dram: page-lock that memory for CUDA in this process, in the background; what the driver
        refuses is used all the same, copied slower. False where another process, an engine's
        worker, maps and pins it.
    nvme_path: directory of the store on disk, made when absent; None keeps everything in DRAM.
    nvme_bytes: disk for chunk files; the index beside them takes about 300 bytes a chunk more.
    io: "process" reads and verifies in a worker process, where the interpreter lock of the
        caller cannot delay it; "threads" stays in this process and starts faster.
    io_lanes: reads and writes under way at once, 1 to 64.
    codec: "raw", or "zstd" for Zstandard over byte planes: smaller files, much slower.
    admission: the policy that decides what may live where: "learned", "gated", "lru", "slru",
        "s3fifo", "arc", "lfu" or "gdsf", or a class or any factory that makes one.
    write_down: "late" writes a chunk to NVMe when admission holds it worth that, ahead of its
        eviction from DRAM and at close(); "eager" every admitted chunk as soon as it is complete.
    trace_path: file that records what requests ask for, as hashes, for `rootcellar tune`; with a
        second one beside it, <name>.1. None records nothing.
    trace_bytes: the most that both may take on disk.
    load_timeout_s: a load not in DRAM by then is cut short, and the engine recomputes the rest.
    """

    dram_bytes: int | str
    pin_dram: bool = True
    nvme_path: str | Path | None = None
    nvme_bytes: int | str = 0
    io: IoKind = "process"
    io_lanes: int = 4
    codec: CodecName = "raw"
    admission: str | Callable[[], AdmissionPolicy] = "learned"
    write_down: WriteDown = "late"
    trace_path: str | Path | None = None
    trace_bytes: int | str = "256MiB"
    load_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        if self.dram_size <= 0:
            raise ValueError(f"dram_bytes is {self.dram_bytes}, must be at least one chunk")
        if self.nvme_path is None and self.nvme_size != 0:
            raise ValueError(f"nvme_bytes is {self.nvme_bytes} but nvme_path is None; give both")
        if self.nvme_path is not None and self.nvme_size <= 0:
            raise ValueError(f"nvme_bytes is {self.nvme_bytes}, must be at least one chunk file")
        _one_of("io", self.io, get_args(IoKind))
        _one_of("codec", self.codec, get_args(CodecName))
        _one_of("write_down", self.write_down, get_args(WriteDown))
        if type(self.io_lanes) is not int or not 1 <= self.io_lanes <= 64:
            raise ValueError(f"io_lanes is {self.io_lanes!r}, must be a whole number from 1 to 64")
        if not self.load_timeout_s > 0:
            raise ValueError(f"load_timeout_s is {self.load_timeout_s!r}, must be above 0")
        parse_bytes("trace_bytes", self.trace_bytes)
        if isinstance(self.admission, str):
            _one_of("admission", self.admission, tuple(sorted(POLICIES)))
        elif not callable(self.admission):
            made = "must be a name, a class or a factory such as lambda: Gated(min_seen=3)"
            raise TypeError(f"admission is {self.admission!r}, {made}")

    def make_policy(self) -> AdmissionPolicy:
        return make(self.admission) if isinstance(self.admission, str) else self.admission()

    @property
    def dram_size(self) -> int:
        return parse_bytes("dram_bytes", self.dram_bytes)

    @property
    def nvme_size(self) -> int:
        return parse_bytes("nvme_bytes", self.nvme_bytes)

    @property
    def trace_size(self) -> int:
        return parse_bytes("trace_bytes", self.trace_bytes)


def parse_bytes(name: str, value: int | str) -> int:
    """Bytes of a size such as 1048576, "1MiB", "1.5 GB"; ValueError naming `name` otherwise."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+)(\.\d+)?\s*([A-Za-z]*)\s*", value)
        if match and match[3] in _UNITS:
            whole, fraction, unit = int(match[1]), float(match[2] or 0), _UNITS[match[3]]
            return whole * unit + int(fraction * unit)
    elif isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise ValueError(f'{name} is {value!r}, must be bytes (>= 0) or a size such as "64GiB"')


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}, must be one of {', '.join(map(repr, allowed))}")
