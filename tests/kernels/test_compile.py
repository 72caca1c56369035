"""What the compiler makes of csrc/*.cu for the GPUs we name: no spills, and how many registers.

registers.json is for one version of nvcc; another is only asked about spills. To write it again:

    RECORD_REGISTERS=1 .venv/bin/pytest tests/kernels/test_compile.py
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rootcellar.kernels import compile as compiling
from rootcellar.kernels.compile import CSRC, OPTIONS, import_cupy, source_text

RECORD = Path(__file__).with_name("registers.json")
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
SOURCES = sorted(path.name for path in CSRC.glob("*.cu"))

Usage = dict[str, dict[str, int]]


@pytest.mark.parametrize("source", SOURCES)
def test_no_kernel_spills_and_registers_are_as_recorded(source: str, tmp_path: Path) -> None:
    version, report = _nvcc_version(), _ptxas_report(source, tmp_path)
    spills = [int(found) for found in re.findall(r"(\d+) bytes spill", report)]
    assert spills
    assert not any(spills), report
    used = _registers(report)
    assert all(set(by_kernel) == set(ARCHITECTURES) for by_kernel in used.values())
    if os.environ.get("RECORD_REGISTERS"):
        _record(version, source, used)
    recorded = json.loads(RECORD.read_text())
    if recorded["nvcc"] == version:
        assert used == recorded["registers"][source]


def test_every_recorded_source_is_there() -> None:
    assert set(json.loads(RECORD.read_text())["registers"]) == set(SOURCES)


@pytest.mark.parametrize("source", SOURCES)
def test_small_floats_are_not_made_zero(source: str, tmp_path: Path) -> None:
    _nvcc_version()
    text, output = tmp_path / source, tmp_path / "out.ptx"
    text.write_text(source_text(source))
    command = ["nvcc", *OPTIONS, "-arch=compute_90", "-ptx", "-o", str(output), str(text)]
    subprocess.run(command, capture_output=True, check=True)
    assert ".ftz" not in output.read_text()


@pytest.mark.parametrize("source", SOURCES)
def test_the_text_to_compile_needs_no_other_file(source: str) -> None:
    text = source_text(source)
    assert "#include" not in text
    assert "#pragma once" not in text
    assert text.count("typedef unsigned long long u64;") == 1


def test_headers_that_others_include_come_once_and_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "CSRC", tmp_path)
    (tmp_path / "a.cuh").write_text("#pragma once\nint a;\n")
    (tmp_path / "b.cuh").write_text('#pragma once\n#include "a.cuh"\nint b;\n')
    (tmp_path / "c.cu").write_text('#include "a.cuh"\n#include "b.cuh"\nint c = a + b;\n')
    lines = [line for line in source_text("c.cu").splitlines() if line]
    assert lines == ["int a;", "int b;", "int c = a + b;"]


@pytest.mark.parametrize(("cuda", "extra"), [("12.8", "cuda12"), ("13.0", "cuda13")])
def test_without_cupy_the_error_names_what_to_install(
    cuda: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr("torch.version.cuda", cuda)
    with pytest.raises(ImportError, match=rf"pip install 'rootcellar\[{extra}\]'"):
        import_cupy()


def _nvcc_version() -> str:
    if not shutil.which("nvcc"):
        pytest.skip("needs nvcc to compile for a GPU")
    said = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True)
    found = re.search(r"V([\d.]+)", said.stdout)
    assert found
    return found[1]


def _ptxas_report(source: str, folder: Path) -> str:
    """Of the very text that runs, with the options it is compiled with."""
    text, output = folder / source, folder / "out.fatbin"
    text.write_text(source_text(source))
    targets = [f"-gencode=arch=compute_{name[3:]},code={name}" for name in ARCHITECTURES]
    command = ["nvcc", *OPTIONS, *targets, "-Xptxas", "-v", "-fatbin", "-o", str(output), str(text)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout + ran.stderr


def _registers(report: str) -> Usage:
    """Kernel -> architecture -> registers."""
    pattern = r"Compiling entry function '(\w+)' for '(\w+)'.*?Used (\d+) registers"
    used: Usage = {}
    for kernel, architecture, count in re.findall(pattern, report, re.S):
        used.setdefault(kernel, {})[architecture] = int(count)
    return used


def _record(version: str, source: str, used: Usage) -> None:
    recorded: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if recorded.get("nvcc") != version:
        recorded = {"nvcc": version, "registers": {}}
    known = {name: of for name, of in recorded["registers"].items() if name in SOURCES}
    recorded["registers"] = known | {source: used}
    RECORD.write_text(json.dumps(recorded, indent=2, sort_keys=True) + "\n")
