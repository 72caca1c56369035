# make demo    serves one workload from HBM, DRAM and NVMe, and again after a restart
# make test    the whole test suite, but for what needs vLLM
# make lint    everything that CI checks besides the tests
# make test-vllm   the tests that start real vLLM engines, on the CPU
# Each sets up .venv first (test-vllm: .venv-vllm), which is quick when nothing changed. ARGS="..." is
# passed on.

SHELL := bash
export PYTHONSAFEPATH := 1

ARGS ?=
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
TORCH := $(shell grep '^torch==' requirements-dev.txt)
VLLM_TORCH := $(shell grep '^torch==' requirements-vllm.txt)
TEST_TOOLS := $(shell grep -E '^(hypothesis|pytest|pytest-timeout)==' requirements-dev.txt)

.PHONY: demo test test-vllm lint clean

demo: .venv/ready
	.venv/bin/rootcellar demo $(ARGS)

test: .venv/ready
	.venv/bin/pytest $(ARGS)

test-vllm: .venv-vllm/ready
	.venv-vllm/bin/pytest tests/connector/vllm $(ARGS)

lint: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/mypy tests
	.venv/bin/pyright

clean:
	rm -rf .venv .venv-vllm build dist *.egg-info

PYTHON_FOUND = @test -n "$(PYTHON)" || { echo "rootcellar needs Python 3.11 or newer on PATH" \
	"(or: make PYTHON=/path/to/python3.11)" >&2; exit 1; }

# $(call cpu_torch,VENV,REQUIREMENT): uv knows where the build without CUDA is. Where it cannot reach
# that, nothing happens, and pip then takes what there is.
cpu_torch = $(1)/bin/pip show --quiet torch 2>/dev/null || { $(1)/bin/pip install --quiet uv && \
	$(1)/bin/uv pip install --quiet --python $(1)/bin/python --torch-backend cpu $(2); } \
	2>/dev/null || true

# torch goes first: whatever else needs torch then takes this build of it.
.venv/ready: pyproject.toml requirements-dev.txt
	$(PYTHON_FOUND)
	test -x .venv/bin/pip || $(PYTHON) -m venv .venv
	@nvidia-smi -L >/dev/null 2>&1 || $(call cpu_torch,.venv,$(TORCH))
	.venv/bin/pip install --quiet $(TORCH)
	.venv/bin/pip install --quiet -r requirements-dev.txt
	touch $@

.venv-vllm/ready: pyproject.toml requirements-dev.txt requirements-vllm.txt .ci/vllm-needs
	$(PYTHON_FOUND)
	test -x .venv-vllm/bin/pip || $(PYTHON) -m venv .venv-vllm
	@$(call cpu_torch,.venv-vllm,$(VLLM_TORCH))
	.venv-vllm/bin/pip install --quiet $(VLLM_TORCH) packaging
	.venv-vllm/bin/pip install --quiet --no-deps -r requirements-vllm.txt
	.venv-vllm/bin/python .ci/vllm-needs > .venv-vllm/needs.txt
	.venv-vllm/bin/pip install --quiet -r .venv-vllm/needs.txt
	.venv-vllm/bin/pip install --quiet -e '.[test]' $(TEST_TOOLS)
	touch $@
