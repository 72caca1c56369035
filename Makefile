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
# Where x86-64 Linux finds torch without CUDA; left out when it does not answer.
CPU_WHEELS := https://download.pytorch.org/whl/cpu

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

# torch goes first: whatever else needs torch then takes this build of it, not a CUDA one.
.venv/ready: pyproject.toml requirements-dev.txt
	@test -n "$(PYTHON)" || { echo "rootcellar needs Python 3.11 or newer on PATH" \
		"(or: make PYTHON=/path/to/python3.11)" >&2; exit 1; }
	test -x .venv/bin/pip || $(PYTHON) -m venv .venv
	@if nvidia-smi -L >/dev/null 2>&1; then index=; \
	elif timeout 10 .venv/bin/python -c 'import urllib.request as u; u.urlopen("$(CPU_WHEELS)/torch/", \
		timeout=5)' 2>/dev/null; then index="--extra-index-url $(CPU_WHEELS)"; \
	else index=; fi; set -x; .venv/bin/pip install --quiet $$index $(TORCH)
	.venv/bin/pip install --quiet -r requirements-dev.txt
	touch $@
