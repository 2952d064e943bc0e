# Every target sets up .venv by itself when it is needed.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
DATA := $(abspath $(wildcard ../shared/data))
ifneq ($(DATA),)
export RECLEAK_DATA ?= $(DATA)
endif

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; say which: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $$(grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,ray,mlflow]'
	@touch $@

.PHONY: audit test test-flower check lint types docs-check bench bench-scale clean help

audit: $(READY)  ## The main job on the embedded data; prints where the result is
	$(BIN)/recleak audit

test: $(READY) lint types  ## Lint, types and the whole test suite
	$(BIN)/pytest -n auto -m "not slow and not flower"
	$(MAKE) --no-print-directory test-flower

test-flower: $(READY)  ## examples/flower for real: SuperLink and SuperNodes on loopback, its recording audited
	$(BIN)/pytest -m flower tests/test_flower_deployment.py

check: $(READY) lint types  ## Lint, types and the quick tests, in under two minutes
	$(BIN)/pytest -n auto -m "not slow and not heavy and not flower" -q

lint: $(READY)  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)  ## mypy --strict
	$(BIN)/mypy

docs-check: $(READY)  ## Links, commands and the module tree in the documentation
	$(BIN)/pytest -q tests/test_docs.py

bench: $(READY)  ## Benchmarks of engine, noise and data: rates, seconds, peak memory, to the terminal and benchmarks/out/
	$(BIN)/python benchmarks/engine.py
	$(BIN)/python benchmarks/feature_gcn.py
	$(BIN)/python benchmarks/plain_sgd.py
	$(BIN)/python benchmarks/dp_sgd.py
	$(BIN)/python benchmarks/gossip.py
	$(BIN)/python benchmarks/draws.py
	$(BIN)/python benchmarks/data.py
	$(BIN)/python benchmarks/flower.py
	$(BIN)/python benchmarks/ray_overhead.py

bench-scale: $(READY)  ## Cost and memory from 1,000 to 100,000 clients: table and plot (minutes)
	$(BIN)/python benchmarks/scale.py

clean:  ## Remove .venv, caches and results
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis runs benchmarks/out

help:  ## This list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'
