"""kvikio and the clock are stand-ins here: neither GPU nor nvidia-fs is needed."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace, TracebackType
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from rootcellar.tiers import gpu_file
from rootcellar.tiers.device import CpuStream
from rootcellar.tiers.gpu_file import GpuFiles, choose, compare, direct_way, dram_way, unusable

SIZE = 8192
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class ToyCuFile:
    """As kvikio's: RuntimeError for whatever goes wrong."""

    def __init__(self, path: str) -> None:
        try:
            self.content = np.fromfile(path, np.uint8)
        except OSError as error:
            raise RuntimeError("Unable to open file") from error

    def __enter__(self) -> "ToyCuFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def raw_read(self, target: torch.Tensor) -> int:
        if not len(self.content):
            raise RuntimeError("cuFile failed")
        content = self.content[: len(target)]
        target[: len(content)] = torch.from_numpy(content)
        return len(content)


def _install_kvikio(
    monkeypatch: pytest.MonkeyPatch, *, compat: bool = False, gds: bool = True
) -> None:
    kvikio = ModuleType("kvikio")
    parts: dict[str, Any] = {
        "CuFile": ToyCuFile,
        "defaults": SimpleNamespace(is_compat_mode_preferred=lambda: compat),
        "cufile_driver": SimpleNamespace(get={"is_gds_available": gds}.__getitem__),
    }
    vars(kvikio).update(parts)
    monkeypatch.setitem(sys.modules, "kvikio", kvikio)
    for name in ("defaults", "cufile_driver"):
        monkeypatch.setitem(sys.modules, f"kvikio.{name}", parts[name])


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuFiles]:
    _install_kvikio(monkeypatch)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    reader = GpuFiles(CUDA)
    yield reader
    reader.close()


def _file(root: Path, num_bytes: int = SIZE) -> tuple[Path, bytes]:
    content = np.random.default_rng(num_bytes).bytes(num_bytes)
    path = root / "file"
    path.write_bytes(content)
    return path, content


# Reading


def test_a_read_fills_the_target_and_says_how_much_came(files: GpuFiles, tmp_path: Path) -> None:
    path, content = _file(tmp_path)
    target = torch.zeros(SIZE // 2, dtype=torch.uint8)
    assert files.read(str(path), target).result() == SIZE // 2
    assert target.numpy().tobytes() == content[: SIZE // 2]
    longer = torch.zeros(SIZE * 2, dtype=torch.uint8)
    assert files.read(str(path), longer).result() == SIZE


def test_a_missing_file_is_told_from_a_read_that_fails(files: GpuFiles, tmp_path: Path) -> None:
    target = torch.zeros(SIZE, dtype=torch.uint8)
    with pytest.raises(FileNotFoundError):
        files.read(str(tmp_path / "nowhere"), target).result()
    path, _ = _file(tmp_path, 0)
    with pytest.raises(RuntimeError, match="cuFile failed"):
        files.read(str(path), target).result()


def test_threads_read_on_the_device_of_the_kv_cache(
    files: GpuFiles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    devices = list[torch.device]()
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    reader = GpuFiles(CUDA)
    reader.read(str(_file(tmp_path)[0]), torch.zeros(SIZE, dtype=torch.uint8)).result()
    reader.close()
    assert devices
    assert set(devices) == {CUDA}


def test_a_read_after_close_fails_in_its_future(files: GpuFiles, tmp_path: Path) -> None:
    files.close()
    files.close()
    future = files.read(str(tmp_path), torch.zeros(1, dtype=torch.uint8))
    assert isinstance(future.exception(), RuntimeError)


# Whether it can be used


def test_without_cuda_kvikio_is_not_even_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_file, "import_module", _refuse)
    assert unusable(CPU) == "the KV cache is on cpu"
    assert choose(Path("nowhere"), CPU, SIZE).reader is None


@pytest.mark.parametrize("error", [ImportError, OSError, RuntimeError])
def test_a_kvikio_that_cannot_be_imported_is_not_used(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(name: str) -> ModuleType:
        raise error("libcufile.so.0 is not there")

    monkeypatch.setattr(gpu_file, "import_module", fail)
    assert unusable(CUDA) == "kvikio cannot be imported: libcufile.so.0 is not there"


@pytest.mark.parametrize(("compat", "gds", "usable"), [(1, 1, 0), (0, 0, 0), (1, 0, 0), (0, 1, 1)])
def test_a_kvikio_that_would_bounce_is_not_used(
    monkeypatch: pytest.MonkeyPatch, compat: bool, gds: bool, usable: bool
) -> None:
    _install_kvikio(monkeypatch, compat=compat, gds=gds)
    assert ("compatibility" in unusable(CUDA)) != usable


# Which is faster


class Clock:
    """A way brings the probe, and takes the seconds it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.order: list[str] = []

    def way(self, name: str, seconds: Sequence[float], wrong: bool = False) -> gpu_file.Way:
        left = iter(seconds)

        def bring(path: Path) -> list[bytes]:
            self.order.append(name)
            self.now_s += next(left)
            digest = xxhash.xxh3_128_digest(path.read_bytes())
            return [digest, bytes(16) if wrong else digest]

        return bring

    def read(self) -> float:
        return self.now_s


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "tmp").mkdir()
    yield tmp_path
    assert not [*(tmp_path / "tmp").iterdir()], "the probe was left"


def test_the_two_ways_take_turns_and_one_slow_round_does_not_count(root: Path) -> None:
    clock = Clock()
    direct = clock.way("direct", [9.0, *[2.0] * 6])
    dram = clock.way("dram", [*[3.0] * 5, 0.1, 90.0])
    assert compare(root, SIZE, direct, dram, clock.read) == 1.5
    assert clock.order == ["direct", "dram"] * 7


@pytest.mark.parametrize("wrong", ["direct", "dram"])
def test_a_way_that_brings_other_bytes_is_an_error(root: Path, wrong: str) -> None:
    clock = Clock()
    ways = [clock.way(name, [1.0] * 7, name == wrong) for name in ("direct", "dram")]
    with pytest.raises(OSError, match="not what was written"):
        compare(root, SIZE, ways[0], ways[1], clock.read)


def test_the_probe_is_of_that_size_and_goes_when_a_way_raises(root: Path) -> None:
    def bring(path: Path) -> list[bytes]:
        assert path.stat().st_size == SIZE
        raise RuntimeError("no driver")

    with pytest.raises(RuntimeError, match="no driver"):
        compare(root, SIZE, bring, bring)


def test_both_ways_bring_the_file_as_often_as_there_are_rows(
    files: GpuFiles, tmp_path: Path
) -> None:
    path, content = _file(tmp_path)
    digest = xxhash.xxh3_128_digest(content)
    for make in (lambda rows: direct_way(files, rows, CpuStream()), _dram_way):
        rows = torch.zeros((3, SIZE), dtype=torch.uint8)
        assert make(rows)(path) == [digest] * 3
        assert [row.numpy().tobytes() for row in rows] == [content] * 3


@pytest.mark.parametrize(("times_as_fast", "used"), [(0.5, False), (1.05, False), (1.5, True)])
def test_it_is_used_where_it_is_clearly_faster(
    ready: list[float | Exception], times_as_fast: float, used: bool
) -> None:
    ready.append(times_as_fast)
    choice = choose(Path("root"), CPU, SIZE)
    assert (choice.reader is not None) == used
    assert f"{times_as_fast:.2f} times as fast" in choice.why
    if choice.reader:
        choice.reader.close()


def test_what_cannot_be_measured_is_not_used(ready: list[float | Exception]) -> None:
    ready.append(RuntimeError("no driver"))
    choice = choose(Path("root"), CPU, SIZE)
    assert choice.reader is None
    assert "no driver" in choice.why


def test_a_reader_that_is_not_used_is_closed(
    ready: list[float | Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = list[GpuFiles]()
    monkeypatch.setattr(GpuFiles, "close", lambda reader: closed.append(reader))
    for outcome in (0.5, RuntimeError("no driver"), 2.0):
        ready[:] = [outcome]
        choose(Path("root"), CPU, SIZE)
    assert len(closed) == 2
    monkeypatch.undo()
    for reader in closed:
        reader.close()


@pytest.fixture
def ready(files: GpuFiles, monkeypatch: pytest.MonkeyPatch) -> list[float | Exception]:
    """All is there, and compare() gives the outcome that is put in here."""
    outcomes = list[float | Exception]()

    def compared(*_: object) -> float:
        outcome = outcomes[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(gpu_file, "unusable", lambda device: "")
    monkeypatch.setattr(gpu_file, "compare", compared)
    return outcomes


def _dram_way(rows: torch.Tensor) -> gpu_file.Way:
    return dram_way(rows, CpuStream(), 0)


def _refuse(name: str) -> ModuleType:
    raise AssertionError(f"imported {name}")
