# `make demo` and `make test` are all that a newcomer needs: each sets up what is missing, then runs.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
KEEP ?= 0

.PHONY: help setup demo test check fmt lint types layers unit contract integration chaos clean

help: ## Show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 24

# The sources of what pip compiles are among what it is made of.
$(STAMP): pyproject.toml tools/setup_venv.sh $(wildcard serve/kernels/*.cpp serve/kernels/*.h)
	@bash tools/setup_venv.sh "$(PYTHON)" "$(VENV)"

setup: $(STAMP) ## Make the virtual environment with everything in it (about two minutes)

demo: $(STAMP) ## Real text to a served, queried model (KEEP=1 leaves the endpoint up)
	@$(BIN)/python -m examples.sotu.demo $(if $(filter 1,$(KEEP)),--keep)

test: $(STAMP) ## Every test, with coverage
	@bash tools/run_tests.sh $(BIN)/python

check: fmt lint types layers ## Format, lint, types, layers

fmt: $(STAMP)
	@$(BIN)/ruff format --check .
lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/codespell
types: $(STAMP)
	@$(BIN)/mypy -p eagleray
layers: $(STAMP)
	@$(BIN)/lint-imports
unit contract integration chaos: $(STAMP) ## One kind of test
	@$(BIN)/python -m pytest tests/$@
clean: ## Remove the environment and caches
	@rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .coverage* htmlcov
