"""What a user may put into `kv_connector_extra_config`; everything else is an error that says so.

vLLM passes the mapping on unread, so a misspelt key would be silence: a tier that is not there,
or a gate that is open. Hence nothing is guessed, and nothing is taken for something near it.
"""

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self, get_args

from ...admission.base import AdmissionPolicy
from ...admission.choices import POLICIES
from ...admission.gated import Gated
from ...admission.write_budget import WriteBudget
from ...tiers.base import WriteDown
from ...tiers.config import CodecName, StoreConfig, parse_bytes

SPEC_NAME = "RootCellarSpec"
SPEC_MODULE = f"{__package__}.spec"

_OURS = {"spec_name": SPEC_NAME, "spec_module_path": SPEC_MODULE}
"""Keys of vLLM that the connector itself sets; a user may repeat them, not change them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """One engine's settings, checked. Sizes are bytes, or strings such as "64GiB".

    dram_bytes: DRAM for chunks, of all ranks together.
    nvme_path: absolute directory on NVMe, made when absent; None keeps everything in DRAM.
    nvme_bytes: disk for chunk files; needed with nvme_path, refused without.
    block_size: tokens in a chunk, a whole number of the engine's blocks; None is 256, or the
        nearest size the engine's blocks allow.
    admission: what decides which chunks live where, by its name in admission/choices.py: "learned"
        keeps what is likely to come back, "lru" admits everything, "gated" what was asked for
        `admission_min_seen` times, where not all fits.
    admission_min_seen: requests with a prefix, the present one counted; 2 when gated, None when
        not.
    nvme_bytes_per_day: the most that "learned" or "gated" may write to NVMe in a day, an hour of it
        at once; None writes all that is worth it.
    write_down: "late", or "eager": every chunk goes to NVMe as soon as it is complete.
    trace_path: absolute path of a file that records what requests ask for, as hashes, for
        `rootcellar tune`; None records nothing.
    trace_bytes: the most that the recording may take on disk; 256 MiB, refused without trace_path.
    codec: "raw", or "zstd": smaller files, much slower.
    io_lanes: reads and writes under way at once, 1 to 64.
    load_timeout_s: what is not read by then is recomputed.
    weights_id: a name for exactly these weights, where they are neither in local files nor at a
        hub commit.
    offload_prompt_only: vLLM's own: leave what was generated out of the store.
    self_describing_kv_events: vLLM's own: KV events name its blocks and carry their tokens.

    Budgets are per data-parallel replica: each is an engine of its own.
    """

    dram_bytes: int | str
    nvme_path: str | None = None
    nvme_bytes: int | str | None = None
    block_size: int | None = None
    admission: str = "learned"
    admission_min_seen: int | None = None
    nvme_bytes_per_day: int | str | None = None
    write_down: WriteDown = "late"
    trace_path: str | None = None
    trace_bytes: int | str | None = None
    codec: CodecName = "raw"
    io_lanes: int = 4
    load_timeout_s: float = 5.0
    weights_id: str | None = None
    offload_prompt_only: bool = True
    self_describing_kv_events: bool = True

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> Self:
        """Of `kv_connector_extra_config`; ValueError names the key, its value and what may be."""
        known = [field.name for field in fields(cls)]
        for key, value in extra.items():
            if key in _OURS:
                _one_of(key, value, (_OURS[key],))
            elif key not in known:
                raise ValueError(_unknown(key, known))
        if "dram_bytes" not in extra:
            raise ValueError('dram_bytes is missing from kv_connector_extra_config, e.g. "64GiB"')
        return cls(**{key: value for key, value in extra.items() if key not in _OURS})

    def __post_init__(self) -> None:
        _size("dram_bytes", self.dram_bytes)
        self._check_nvme()
        if self.block_size is not None:
            _whole("block_size", self.block_size, most=None)
        _one_of("admission", self.admission, tuple(sorted(POLICIES)))
        self._check_min_seen()
        self._check_budget()
        _one_of("write_down", self.write_down, get_args(WriteDown))
        self._check_trace()
        _one_of("codec", self.codec, get_args(CodecName))
        _whole("io_lanes", self.io_lanes, most=64)
        _seconds("load_timeout_s", self.load_timeout_s)
        if self.weights_id is not None and not _is_text(self.weights_id):
            raise ValueError(f"weights_id is {self.weights_id!r}, must be a text or left out")
        for name in ("offload_prompt_only", "self_describing_kv_events"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"{name} is {getattr(self, name)!r}, must be true or false")

    def store_config(self, replica: int = 0, num_replicas: int = 1) -> StoreConfig:
        """For data-parallel replica `replica` of `num_replicas`.

        A directory has one owner, so each replica gets a folder of its own in nvme_path, which is
        then made here if its parent is there; nothing else is touched.
        """
        path = None if self.nvme_path is None else Path(self.nvme_path)
        if path is not None and num_replicas > 1:
            if path.parent.is_dir():
                path.mkdir(mode=0o700, exist_ok=True)
            path /= f"replica-{replica}"
        return StoreConfig(
            dram_bytes=self.dram_bytes,
            # Workers map it and pin their own mapping; the scheduler has no use for CUDA.
            pin_dram=False,
            nvme_path=path,
            nvme_bytes=self.nvme_bytes or 0,
            io_lanes=self.io_lanes,
            codec=self.codec,
            admission=self._policy(),
            write_down=self.write_down,
            trace_path=self._trace_of(replica, num_replicas),
            trace_bytes="256MiB" if self.trace_bytes is None else self.trace_bytes,
            load_timeout_s=self.load_timeout_s,
        )

    def _policy(self) -> Callable[[], AdmissionPolicy]:
        if self.admission_min_seen is None and self.nvme_bytes_per_day is None:
            return POLICIES[self.admission]
        return self._make_policy

    def _make_policy(self) -> AdmissionPolicy:
        budget = None
        if self.nvme_bytes_per_day is not None:
            a_day = parse_bytes("nvme_bytes_per_day", self.nvme_bytes_per_day)
            budget = WriteBudget.per_day(a_day)
        if self.admission == "gated":
            return Gated(min_seen=self.admission_min_seen or 2, write_budget=budget)
        from ...admission.learned.policy import Learned  # compiles

        return Learned(write_budget=budget)

    def _trace_of(self, replica: int, num_replicas: int) -> Path | None:
        """A recording has one writer."""
        if self.trace_path is None:
            return None
        path = Path(self.trace_path)
        return path if num_replicas == 1 else path.with_name(f"{path.name}-replica-{replica}")

    def _check_nvme(self) -> None:
        path = self.nvme_path
        if path is None:
            if self.nvme_bytes is not None:
                raise ValueError(f"nvme_bytes is {self.nvme_bytes!r} without nvme_path; give both")
        elif not _is_absolute(path):
            raise ValueError(f"nvme_path is {path!r}, must be an absolute path of a directory")
        elif self.nvme_bytes is None:
            raise ValueError(f'nvme_path is {path!r} without nvme_bytes; give both, e.g. "1TiB"')
        else:
            _size("nvme_bytes", self.nvme_bytes)

    def _check_trace(self) -> None:
        if self.trace_path is None:
            if self.trace_bytes is not None:
                given = f"trace_bytes is {self.trace_bytes!r}"
                raise ValueError(f"{given} without trace_path, which must be given too")
        elif not _is_absolute(self.trace_path):
            raise ValueError(
                f"trace_path is {self.trace_path!r}, must be an absolute path of a file"
            )
        if self.trace_bytes is not None:
            _size("trace_bytes", self.trace_bytes)

    def _check_budget(self) -> None:
        if self.nvme_bytes_per_day is None:
            return
        _size("nvme_bytes_per_day", self.nvme_bytes_per_day)
        given = f"nvme_bytes_per_day is {self.nvme_bytes_per_day!r}"
        if self.nvme_path is None:
            raise ValueError(f"{given} without nvme_path, which must be given too")
        if self.admission not in ("learned", "gated"):
            raise ValueError(
                f'{given}, which only counts with admission "learned" or "gated",'
                f" not {self.admission!r}"
            )

    def _check_min_seen(self) -> None:
        if self.admission_min_seen is None:
            return
        _whole("admission_min_seen", self.admission_min_seen, most=None)
        if self.admission != "gated":
            raise ValueError(
                f"admission_min_seen is {self.admission_min_seen}, which only counts with "
                f'admission "gated", not {self.admission!r}'
            )


def _unknown(key: object, known: list[str]) -> str:
    near = difflib.get_close_matches(str(key), known, n=1)
    meant = f", did you mean {near[0]!r}?" if near else "."
    return (
        f"kv_connector_extra_config has the unknown key {key!r}{meant} "
        f"Valid keys: {', '.join(known)}"
    )


def _size(name: str, value: object) -> None:
    """parse_bytes says what a size is; none of ours may be nothing."""
    if not isinstance(value, int | str) or parse_bytes(name, value) <= 0:
        raise ValueError(f'{name} is {value!r}, must be bytes (> 0) or a size such as "64GiB"')


def _whole(name: str, value: object, *, most: int | None) -> None:
    """type, not isinstance: a bool is no number here."""
    if type(value) is not int or value < 1 or (most is not None and value > most):
        allowed = "of at least 1" if most is None else f"from 1 to {most}"
        raise ValueError(f"{name} is {value!r}, must be a whole number {allowed}")


def _seconds(name: str, value: object) -> None:
    is_bool = isinstance(value, bool)
    if not isinstance(value, int | float) or is_bool or not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}, must be a finite number of seconds above 0")


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}, must be {' or '.join(map(repr, allowed))}")


def _is_absolute(path: object) -> bool:
    return _is_text(path) and Path(str(path)).is_absolute() and "\0" not in str(path)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())
