import os
import time
from pathlib import Path

import pytest
import torch

from rootcellar.bench import device_sanitizer
from rootcellar.bench.device_budget import Part
from rootcellar.bench.device_scale import DRY
from rootcellar.bench.device_section import Findings, Row, Site


def measured(device: str = "cuda", seconds: float = 60) -> Findings:
    site = Site(device=torch.device(device), directory=Path(), seed=0, scale=DRY)
    return device_sanitizer.measure(site, Part(seconds, lambda fraction: None))


def install(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def test_it_says_why_it_has_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "needs a GPU" in measured("cpu").skipped
    monkeypatch.setattr(device_sanitizer, "PLACES", ())
    monkeypatch.setenv("PATH", "/nowhere")
    assert "no compute-sanitizer" in measured().skipped


def test_a_clean_run_is_told_with_the_tools_own_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = 'echo "$@" >>calls; echo "========= ERROR SUMMARY: 0 errors"'
    install(tmp_path, script.replace("calls", str(tmp_path / "calls")), monkeypatch)
    found = measured()
    assert not found.wrong
    assert [(row["tool"], row["kernels"]) for row in found.rows] == [
        ("memcheck", "all"),
        ("racecheck", "fp8"),
        ("racecheck", "xxh3"),
    ]
    assert {row["exit_code"] for row in found.rows} == {0}
    assert {row["summary"] for row in found.rows} == {"ERROR SUMMARY: 0 errors"}
    called = (tmp_path / "calls").read_text().splitlines()
    assert all(line.endswith("-P -m rootcellar.bench.device_memcheck") for line in called)
    assert [line.count("--kernel-name kns=") for line in called] == [0, 1, 1]


@pytest.mark.parametrize("code", [86, 1])
def test_what_it_finds_is_wrong_and_shown(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, f"echo Invalid write of size 16; exit {code}", monkeypatch)
    found = measured()
    assert [row["exit_code"] for row in found.rows] == [code] * 3
    assert len(found.wrong) == 3
    assert all("Invalid write of size 16" in wrong for wrong in found.wrong)


def test_a_run_that_takes_too_long_is_ended_with_what_it_started_and_is_not_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, f"sleep 600 & echo $! >>{tmp_path}/pids; wait", monkeypatch)
    monkeypatch.setattr(device_sanitizer, "_LEAST_S", 0.5)
    found = measured(seconds=0.001)
    assert not found.wrong
    assert [row["exit_code"] for row in found.rows] == [None] * 3
    assert all(row["summary"].startswith("not done in") for row in found.rows)
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 3
    for pid in pids:
        while is_running(pid):
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("seconds", "expected"), [(180.0, [60.0, 90.0, 180.0]), (60.0, [30.0, 30.0, 60.0])]
)
def test_each_check_has_its_share_of_what_is_left_or_what_it_needs_at_least(
    seconds: float, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts_s = list[float]()

    def run(tool: list[str], timeout_s: float) -> tuple[Row, str]:
        timeouts_s.append(timeout_s)
        return {"exit_code": 0}, ""

    monkeypatch.setattr(device_sanitizer, "_run", run)
    monkeypatch.setattr("shutil.which", lambda name, path: name)
    site = Site(device=torch.device("cuda"), directory=Path(), seed=0, scale=DRY)
    device_sanitizer.measure(site, Part(seconds, lambda fraction: None, clock=lambda: 0.0))
    assert timeouts_s == expected


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
