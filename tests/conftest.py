import importlib.util
import sys
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).parents[1]

# A busy machine is no fault of the code: nothing here asserts how long something took.
settings.register_profile("rootcellar", deadline=None)
settings.load_profile("rootcellar")

# vLLM has a virtual environment of its own: `make test-vllm` runs these there.
collect_ignore = [] if importlib.util.find_spec("vllm") else ["connector/vllm"]


def pytest_configure() -> None:
    """Refuse to run with the checkout on sys.path: it would shadow Hugging Face's `kernels`."""
    if any(Path(entry or ".").resolve() == ROOT for entry in sys.path):
        pytest.exit("repo root is on sys.path; run `pytest`, not `python -m pytest`", returncode=4)
