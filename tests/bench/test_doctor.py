import io
import json
import os
import resource
import subprocess
import sys
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pytest
import torch
from rich.console import Console

from rootcellar.bench import doctor
from rootcellar.bench.doctor import Status
from rootcellar.tiers.io.testing import open_files


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(doctor, "LANE_BYTES", 8 << 20)


@pytest.mark.usefixtures("_quick")
def test_every_check_reports_a_status_and_a_value(tmp_path: Path) -> None:
    result = doctor.run(tmp_path, probe_s=0)
    assert json.loads(json.dumps(result)) == result
    assert {check["name"] for check in result["checks"]} == {
        "python",
        "torch",
        "cuda",
        "cupy",
        "memlock limit",
        "pinned DRAM",
        "NUMA node of the GPU",
        "NVMe straight to the GPU",
        "shmem huge pages",
        "hugetlb pages",
        "MADV_POPULATE_WRITE",
        "memory bandwidth",
        "free space",
        "O_DIRECT",
        "disk write",
        "disk read",
    }
    for check in result["checks"]:
        assert check["value"]
        assert check["status"] in ("ok", "warn", "bad")
        assert bool(check["advice"]) == (check["status"] != "ok")
    statuses = [check["status"] for check in result["checks"]]
    assert result["num_warn"] == statuses.count("warn")
    assert result["num_bad"] == statuses.count("bad") == 0


@pytest.mark.usefixtures("_quick")
def test_nothing_is_left_in_the_directory(tmp_path: Path) -> None:
    doctor.run(tmp_path, probe_s=0)
    assert os.listdir(tmp_path) == []


def test_a_probe_that_is_killed_leaves_nothing_either(tmp_path: Path) -> None:
    source = (
        "import sys; from pathlib import Path; from rootcellar.bench import doctor\n"
        "list(doctor._directory(Path(sys.argv[1]), 100))"
    )
    command = [sys.executable, "-P", "-c", source, str(tmp_path)]
    with subprocess.Popen(command) as probe:
        try:
            _wait_for_nameless_file(probe, tmp_path)
            assert os.listdir(tmp_path) == []
        finally:
            probe.kill()
    assert os.listdir(tmp_path) == []


def _wait_for_nameless_file(probe: subprocess.Popen[bytes], directory: Path) -> None:
    """Until the process holds a file of `directory` whose name is gone and whose bytes are not."""
    descriptors = Path(f"/proc/{probe.pid}/fd")
    while probe.poll() is None:
        for link in descriptors.iterdir():
            with suppress(FileNotFoundError):  # closed since it was listed
                target = os.readlink(link)
                if target.startswith(str(directory)) and target.endswith("(deleted)"):
                    return
        time.sleep(0.01)
    raise AssertionError("the probe ended by itself")


@pytest.mark.parametrize("name", ["a file", "missing"])
def test_what_is_no_directory_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    with pytest.raises(ValueError, match=f"{name}, must be an existing directory"):
        doctor.run(tmp_path / name)
    assert os.listdir(tmp_path) == ["a file"]


def test_a_directory_that_takes_no_file_is_bad() -> None:
    checks = list(doctor._directory(Path("/proc"), 0))
    assert [check.status for check in checks if check.name == "directory"] == [Status.BAD]


def test_a_directory_without_room_is_bad_and_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "LANE_BYTES", 1 << 60)
    checks = {check.name: check for check in doctor._directory(tmp_path, 0)}
    assert checks["free space"].status is Status.BAD
    assert set(checks) == {"free space", "O_DIRECT"}


@pytest.mark.usefixtures("_quick")
def test_a_file_system_without_o_direct_is_measured_through_the_page_cache(tmp_path: Path) -> None:
    with doctor._nameless_file(tmp_path) as fd:
        checks = list(doctor._disk_speed(fd, direct=False, probe_s=0))
    assert [check.name for check in checks] == ["disk write", "disk read"]
    assert all("page cache" in check.value for check in checks)
    with open("/proc/self/status") as file:
        assert not doctor._bypass_page_cache(file.fileno())
    assert doctor._o_direct(direct=False).status is Status.WARN


@pytest.mark.usefixtures("_quick")
def test_the_disk_probe_moves_every_lane_at_least_once(tmp_path: Path) -> None:
    with doctor._nameless_file(tmp_path) as fd:
        list(doctor._disk_speed(fd, doctor._bypass_page_cache(fd), probe_s=0))
        size = os.fstat(fd).st_size
    assert size == (doctor.LANES - 1) * doctor.LANE_BYTES + doctor.BLOCK_BYTES


@pytest.mark.parametrize(
    ("modes", "status"),
    [
        ("always within_size [advise] never deny force", Status.OK),
        ("[always] within_size advise never deny force", Status.OK),
        ("always within_size advise [never] deny force", Status.WARN),
        ("always within_size advise never [deny] force", Status.WARN),
        ("", Status.WARN),
    ],
)
def test_shmem_huge_pages_are_read_from_the_kernel(
    modes: str, status: Status, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = tmp_path / "shmem_enabled"
    if modes:
        setting.write_text(modes)
    monkeypatch.setattr(doctor, "_SHMEM_HUGE", setting)
    check = doctor._shmem_huge_pages()
    assert check.status is status
    assert bool(check.advice) == (status is Status.WARN)


@pytest.mark.parametrize(
    ("limit", "status", "value"),
    [(resource.RLIM_INFINITY, Status.OK, "unlimited"), (8 << 20, Status.WARN, "8.0 MiB")],
)
def test_a_memlock_limit_is_shown_with_its_size(
    limit: int, status: Status, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    check = doctor._memlock(Status.WARN)
    assert (check.status, check.value) == (status, value)
    assert doctor._memlock(Status.OK).advice == ""


def test_a_gpu_is_named_and_makes_its_own_limits_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU one")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(metadata, "distributions", lambda: iter(()))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (0, 0))
    monkeypatch.setattr(doctor, "TorchRuntime", lambda device: _Cuda(0))
    monkeypatch.setattr(doctor, "unusable", lambda device: f"not {device}")
    cuda, cupy, memlock, pinned, node, direct = doctor._cuda()
    assert (cuda.status, cuda.value) == (Status.OK, "13.0: GPU one")
    assert (cupy.status, cupy.advice) == (Status.WARN, "pip install 'rootcellar[cuda13]'")
    assert memlock.status is Status.WARN
    assert pinned.status is node.status is direct.status is Status.OK
    assert direct.value == "not cuda:0"


def test_direct_reads_are_possible_where_nothing_speaks_against_them() -> None:
    assert doctor._direct_reads("").value == "possible"
    assert doctor._direct_reads("no driver").value == "no driver"


class _Cuda:
    """Answers every call with one code, or with an error."""

    def __init__(self, answer: int | RuntimeError) -> None:
        self.answer = answer
        self.registered: list[int] = []

    def register(self, address: int, size_bytes: int, /) -> int:
        if isinstance(self.answer, RuntimeError):
            raise self.answer
        self.registered += [address] * (self.answer == 0)
        return self.answer

    def unregister(self, address: int, /) -> int:
        self.registered.remove(address)
        return 0

    def describe(self, code: int, /) -> str:
        return f"out of memory ({code})"


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize(
    ("answer", "status", "value"),
    [
        (0, Status.OK, "yes, 1.0 MiB tried"),
        (2, Status.WARN, "1.0 MiB refused: out of memory (2)"),
        (RuntimeError("CUDA was forked"), Status.WARN, "1.0 MiB refused: CUDA was forked"),
    ],
)
def test_pinning_is_tried_and_undone(
    answer: int | RuntimeError, status: Status, value: str
) -> None:
    cuda, before = _Cuda(answer), open_files()
    check = doctor._pinning(cuda)
    assert (check.status, check.value) == (status, value)
    assert bool(check.advice) == (status is Status.WARN)
    assert cuda.registered == []
    assert open_files() == before


@pytest.mark.parametrize(
    ("node", "value"), [(1, "1"), (0, "0"), (None, "no preference: unknown, or several")]
)
def test_the_node_of_the_gpu_is_shown(
    node: int | None, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "gpu_node", {"0000:17:00.0": node}.get)
    check = doctor._gpu_node("0000:17:00.0")
    assert (check.status, check.value, check.advice) == (Status.OK, value, "")


def test_the_table_shows_what_it_is_told_letter_by_letter() -> None:
    check = {"name": "cupy", "status": "warn", "value": "[x]", "advice": "pip install 'a[cuda12]'"}
    console = Console(width=80, file=io.StringIO())
    with console.capture() as shown:
        console.print(doctor.table({"directory": "/a[b]", "checks": [check]}))
    assert all(part in shown.get() for part in ("/a[b]", "[x]", "pip install 'a[cuda12]'"))


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (5 << 29, "2.5 GiB"),
        (3 << 50, "3072.0 TiB"),
    ],
)
def test_sizes_are_shown_in_units_that_fit(num_bytes: int, shown: str) -> None:
    assert doctor._size(num_bytes) == shown
