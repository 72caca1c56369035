"""Section: the kernels once more under compute-sanitizer, which sees every access out of bounds.

A process of its own runs them on small tensors, each in an allocation of its own: in a shared one,
a step beyond the end would land in the neighbour's memory, unseen.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from .device_budget import Part
from .device_section import Findings, Row, Site

PLACES = ("/usr/local/cuda/bin", "/opt/cuda/bin")
CHECKS = (("memcheck", ""), ("racecheck", "fp8"), ("racecheck", "xxh3"))
"""Each tool, and part of the names of the kernels it looks at: those that share memory are ours to
race in, torch's are not."""

_LEAST_S = 30.0
_FOUND_CODE = 86  # of compute-sanitizer, when it found something
_SHOWN_CHARACTERS = 2000


def measure(site: Site, part: Part) -> Findings:
    if not site.on_gpu:
        return Findings(skipped="needs a GPU: it sees nothing of what runs on a CPU")
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), *PLACES))
    program = shutil.which("compute-sanitizer", path=path)
    if program is None:
        return Findings(skipped=f"no compute-sanitizer on PATH or in {', '.join(PLACES)}")
    found = Findings()
    for number, (tool, kernels) in enumerate(CHECKS):
        only = ["--kernel-name", f"kns={kernels}"] if kernels else []
        # A slow one must not take the time of those that follow.
        timeout_s = max(_LEAST_S, part.left_s / (len(CHECKS) - number))
        row, output = _run([program, "--tool", tool, *only], timeout_s)
        found.rows.append({"tool": tool, "kernels": kernels or "all"} | row)
        if row["exit_code"] not in (0, None):
            found.wrong.append(f"{tool}: {output[-_SHOWN_CHARACTERS:]}")
    return found


def _run(tool: list[str], timeout_s: float) -> tuple[Row, str]:
    """Exit code None: it was not done in time, which is slow, not wrong."""
    command = [
        *tool,
        *("--error-exitcode", str(_FOUND_CODE)),
        *("--target-processes", "all"),
        *("--report-api-errors", "no"),  # torch asks for what may not be there, and goes on
        *(sys.executable, "-P", "-m", f"{__package__}.device_memcheck"),
    ]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONSAFEPATH": "1"}
    start_s = time.perf_counter()
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # what it runs is not its only process
            process.wait()
            return _row(None, start_s, f"not done in {timeout_s:.0f} s"), ""
        log.seek(0)
        output = log.read()
    return _row(process.returncode, start_s, _summary(output)), output


def _row(exit_code: int | None, start_s: float, summary: str) -> Row:
    taken_s = time.perf_counter() - start_s
    return {"exit_code": exit_code, "taken_s": taken_s, "summary": summary}


def _summary(output: str) -> str:
    found = re.findall(r"\w+ SUMMARY: .*", output)
    return found[-1].strip() if found else "no summary"
