import os
import subprocess
import sys
from pathlib import Path

import rootcellar.admission

SOURCE = """
from rootcellar.admission.jit import jit
from called import called

@jit
def caller(x: int) -> int:
    return called(x)

if __name__ == "__main__":
    print(caller(1))
"""
CALLED = """
from rootcellar.admission.jit import jit

@jit
def called(x: int) -> int:
    return x + {}
"""


def test_what_was_compiled_is_not_used_after_a_change_in_another_module(tmp_path: Path) -> None:
    """Numba compiles a function into those that call it, and looks only at the callers' file."""
    (tmp_path / "caller.py").write_text(SOURCE)
    for number in (10, 1000):
        (tmp_path / "called.py").write_text(CALLED.format(number))
        assert _run(tmp_path) == str(number + 1)


def test_what_was_compiled_is_kept(tmp_path: Path) -> None:
    (tmp_path / "caller.py").write_text(SOURCE)
    (tmp_path / "called.py").write_text(CALLED.format(10))
    _run(tmp_path)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "__pycache__").glob("*.nbc")}
    assert kept
    _run(tmp_path)
    assert kept == {p: p.stat().st_mtime_ns for p in (tmp_path / "__pycache__").glob("*.nbc")}


def test_reading_the_package_compiles_nothing() -> None:
    """The command line's help and the IO worker must not wait for numba."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, rootcellar.admission.choices, rootcellar.tiers.config,"
            " rootcellar.tiers.io.worker, rootcellar.cli; assert 'numba' not in sys.modules",
        ],
        env=os.environ | {"PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert rootcellar.admission.__doc__


def _run(folder: Path) -> str:
    env = os.environ | {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "caller.py"], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
