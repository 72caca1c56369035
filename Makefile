# make demo    serves one workload from HBM, DRAM and NVMe, and again after a restart
# make test    the whole test suite
# make lint    everything that CI checks besides the tests
# Each sets up .venv first, which is quick when nothing changed. ARGS="..." is passed on.

SHELL := bash
export PYTHONSAFEPATH := 1

ARGS ?=
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
TORCH := $(shell grep '^torch==' requirements-dev.txt)

.PHONY: demo test lint clean

demo: .venv/ready
	.venv/bin/rootcellar demo $(ARGS)

test: .venv/ready
	.venv/bin/pytest $(ARGS)

lint: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/mypy tests
	.venv/bin/pyright

clean:
	rm -rf .venv build dist *.egg-info

# torch goes first: whatever else needs torch then takes this build of it, not a CUDA one. uv knows
# where the build without CUDA is; where it cannot reach that, pip takes what there is.
.venv/ready: pyproject.toml requirements-dev.txt
	@test -n "$(PYTHON)" || { echo "rootcellar needs Python 3.11 or newer on PATH" \
		"(or: make PYTHON=/path/to/python3.11)" >&2; exit 1; }
	test -x .venv/bin/pip || $(PYTHON) -m venv .venv
	@nvidia-smi -L >/dev/null 2>&1 || .venv/bin/pip show --quiet torch 2>/dev/null || \
		{ .venv/bin/pip install --quiet uv && .venv/bin/uv pip install --quiet \
		--python .venv/bin/python --torch-backend cpu $(TORCH); } 2>/dev/null || true
	.venv/bin/pip install --quiet $(TORCH)
	.venv/bin/pip install --quiet -r requirements-dev.txt
	touch $@
