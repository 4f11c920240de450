# Every target sets itself up: on a fresh machine `make demo` or `make test` is the first command.
#
# Two stages share one virtual environment. `.venv/.desk` is the small install that plans and
# estimates; `.venv/.ready` adds torch, DeepSpeed and the tools of development. A stage is built
# again only when pyproject.toml or constraints.txt has changed.

PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet
SOURCES := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test check test-all lint format clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

$(BIN)/python:
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 10) <= v < (3, 13) else "tightfit needs Python 3.10 to 3.12; set PYTHON=python3.11, say")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip

$(VENV)/.desk: $(SOURCES) | $(BIN)/python
	$(PIP) install -c constraints.txt -e .
	touch $@

# torch comes first and DeepSpeed second, outside pip's build isolation: DeepSpeed's setup.py imports
# torch to learn what it is built for. Its kernels are compiled when first used, not now.
$(VENV)/.ready: $(SOURCES) | $(BIN)/python
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt setuptools ninja py-cpuinfo
	DS_BUILD_OPS=0 $(PIP) install -c constraints.txt --no-build-isolation deepspeed
	$(PIP) install -c constraints.txt -e '.[train,dev]'
	touch $(VENV)/.desk $@

demo: $(VENV)/.desk  ## what a 7B Mamba needs on six 32 GB cards, and the fastest way to train it; no torch
	@run() { printf '\n$$ tightfit %s\n' "$$*"; $(BIN)/tightfit "$$@"; }; set -e; \
	run models --gpus 6x32GB --seq 2048; \
	run estimate --model 7b_mamba --engine zero3 --offload-optimizer cpu --world 6 --gpus 6x32GB; \
	run estimate --model 7b_mamba --world 6 --gpus 6x32GB --compare; \
	run plan --model 7b_mamba --gpus 6x32GB --host-ram 256GB

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint  ## lint, types and every test that is not slow
	$(BIN)/pytest -n $(WORKERS) -m "not slow"

check: lint  ## lint, types and the quick tests: what to run before a commit
	$(BIN)/pytest -n $(WORKERS) -m "not slow and not thorough"

test-all: lint  ## the slow tests as well
	$(BIN)/pytest -n $(WORKERS)

format: $(VENV)/.ready  ## rewrite the code as the linter wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the virtual environment and every cache
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find . -name '*.egg-info' -type d -prune -exec rm -rf {} +
