"""Real engines on vLLM's CPU backend; `make test-vllm` runs what is here."""

import os

# First: torch and vLLM read it when they are imported.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # Compiling the sampler would take longer than all it ever does here.
    "TORCH_COMPILE_DISABLE": "1",
}

from pathlib import Path

import pytest

from .models import save_model


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        # What vLLM and its many dependencies warn of is theirs to mend: only ours stay errors.
        r"ignore:::(?!rootcellar\.|tests\.|_pytest\.)",
        # An engine's ZeroMQ context; the collection that finds it may be any module's.
        "ignore:Unclosed context <zmq:ResourceWarning",
    ):
        config.addinivalue_line("filterwarnings", line)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def llama(models: Path) -> Path:
    return save_model(models / "llama")
