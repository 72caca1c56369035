import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def pytest_configure() -> None:
    """Refuse to run with the checkout on sys.path: it would shadow Hugging Face's `kernels`."""
    if any(Path(entry or ".").resolve() == ROOT for entry in sys.path):
        pytest.exit("repo root is on sys.path; run `pytest`, not `python -m pytest`", returncode=4)
