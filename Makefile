# Every target sets itself up: on a fresh machine `make demo` or `make test` is the first command.
#
# The stages share one virtual environment. `.venv/.train` has torch, DeepSpeed and what trains; `.venv/.ready` adds
# bitsandbytes, Liger, the page, the tools of development, and the browser that the page is tested with. A stage is built
# again only when pyproject.toml or constraints.txt has changed.

PYTHON ?= python3
WORKERS ?= 3  # of which one most often waits for processes of its test
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet
SOURCES := pyproject.toml constraints.txt
CHROMIUM := /usr/bin/chromium
BROWSER := chromium fonts-wqy-microhei  # and a font with Chinese characters, which it has none of itself

PYTEST = $(BIN)/pytest -n $(WORKERS) --dist worksteal $(FLAGS)

.DEFAULT_GOAL := help
.PHONY: help demo test test-busy check test-all lint format docs pages clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

$(BIN)/python:
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 10) <= v < (3, 13) else "tightfit needs Python 3.10 to 3.12; set PYTHON=python3.11, say")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip

# torch comes first and DeepSpeed second, outside pip's build isolation: DeepSpeed's setup.py imports
# torch to learn what it is built for. Its kernels are compiled when first used, not now.
$(VENV)/.train: $(SOURCES) | $(BIN)/python
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt setuptools ninja py-cpuinfo
	DS_BUILD_OPS=0 $(PIP) install -c constraints.txt --no-build-isolation deepspeed
	$(PIP) install -c constraints.txt -e '.[train]'
	touch $@

$(VENV)/.ready: $(VENV)/.train
	$(PIP) install -c constraints.txt -e '.[train,qlora,kernels,tensorboard,web,dev]'
	@if [ ! -x $(CHROMIUM) ] && [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
		(apt-get install -qy $(BROWSER) || { apt-get update -q && apt-get install -qy $(BROWSER); }) > /dev/null 2>&1 || \
		echo "chromium cannot be installed: the tests of the page in a browser will be skipped"; fi
	touch $@

DEMO := build/demo

demo: $(VENV)/.train  ## plan, train a tiny Mamba on this machine through real DeepSpeed, export it, let it speak
	@run() { printf '\n$$ tightfit %s\n' "$$*"; $(BIN)/tightfit "$$@"; }; set -e; rm -rf $(DEMO); mkdir -p $(DEMO); \
	run plan --model 7b_mamba --gpus 6x32GB --host-ram 256GB; \
	run train --model tiny_mamba --data shipped:text --engine zero2 --precision fp32 --seq 64 --effective-batch 8 \
		--max-steps 60 --learning-rate 3e-3 --output $(DEMO)/run; \
	run export $(DEMO)/run --to $(DEMO)/model; \
	printf '\n$$ python examples/generate.py %s\n' $(DEMO)/model; $(BIN)/python examples/generate.py $(DEMO)/model

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy computes in one process for as long as a good part of the tests: it runs beside them, and either may fail.
define typed_and_tested
$(BIN)/mypy & types=$$!; $(PYTEST) $(1); tests=$$?; wait $$types && exit $$tests
endef

test: lint  ## lint, types and every test that is not slow
	@$(call typed_and_tested,-m "not slow")

test-busy: lint  ## the same beside eight processes that take whatever they get of the processors
	@for each in 1 2 3 4 5 6 7 8; do (while :; do :; done) & others="$$others $$!"; done; \
	trap "kill $$others" EXIT INT TERM; $(call typed_and_tested,-m "not slow")

check: lint  ## lint, types and the quick tests: what to run before a commit
	@$(call typed_and_tested,-m "not slow and not thorough")

test-all: lint  ## the slow tests as well
	@$(call typed_and_tested)

format: $(VENV)/.ready  ## rewrite the code as the linter wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.ready  ## the documentation as a site, in build/docs
	$(BIN)/zensical build --strict

PAGES := benchmarks/accuracy.py benchmarks/pace_accuracy.py benchmarks/published.py benchmarks/notes_table.py \
	benchmarks/phase_pictures.py "benchmarks/fast.py page" "benchmarks/worker_pace.py page" "benchmarks/checkpoint_speed.py page" \
	"benchmarks/scan_speed.py page" "benchmarks/states.py page" benchmarks/failures.py \
	tests/diagnose/test_page.py tests/planner/test_notes.py tests/cli/test_schema.py examples/write_plans.py \
	tests/examples/test_examples.py tests/test_docs.py tests/test_chinese_docs.py tests/web/test_plan_browser.py \
	tests/web/test_browser.py

pages: $(VENV)/.ready  ## write again every page, picture and golden that is made from what the program says
	@set -e; for page in $(PAGES); do echo "$$page"; $(BIN)/python $$page; done

clean:  ## remove the virtual environment and every cache
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find . -name '*.egg-info' -type d -prune -exec rm -rf {} +
