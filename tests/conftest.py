import sys
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).parents[1]

# A busy machine is no fault of the code: nothing here asserts how long something took.
settings.register_profile("rootcellar", deadline=None)
settings.load_profile("rootcellar")


def pytest_configure() -> None:
    """Refuse to run with the checkout on sys.path: it would shadow Hugging Face's `kernels`."""
    if any(Path(entry or ".").resolve() == ROOT for entry in sys.path):
        pytest.exit("repo root is on sys.path; run `pytest`, not `python -m pytest`", returncode=4)
