# Each target sets up what it needs: on a fresh machine `make demo` is the first command to give.
.DEFAULT_GOAL := help
.PHONY: help setup lint test test-gpu demo clean
BIN := .venv/bin

help:
	@echo "make demo    quantize a real model to 4 bits, measure it, let it speak (about 4 minutes after downloads)"
	@echo "make test    every check: style, types, imports, tests"
	@echo "make test-gpu  the tests that need a Hopper GPU"
	@echo "make lint    style, types and imports only"
	@echo "make setup   create .venv with everything (the targets above do it when needed)"
	@echo "make clean   remove .venv, the demo's output and caches in this directory"

setup:
	@bash scripts/setup.sh

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

test: lint
	$(BIN)/python -m pytest

test-gpu: setup
	$(BIN)/python -m pytest -m gpu

demo: setup
	@$(BIN)/python scripts/demo.py

clean:
	rm -rf .venv demo-out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
