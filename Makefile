PYTHON ?= python3.11
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

.PHONY: demo results pages test test-slow lint clean

demo: .venv/core
	$(BIN)/assay train --preset demo

results: .venv/core  # docs/results.md: every claim, what is there already is not run again
	$(BIN)/assay replicate all --out docs/results
	cp docs/results/verdicts.json src/assay/recipes/verdicts.json

pages: .venv/core  # what methods say of themselves, into docs/methods and README.md
	$(BIN)/python tools/pages.py

test: .venv/dev
	$(BIN)/pytest -n 2 --dist loadfile

test-slow: .venv/dev
	$(BIN)/pytest -n 2 --dist loadfile -m slow

lint: .venv/dev
	$(BIN)/ruff check src tests benchmarks examples tools
	$(BIN)/ruff format --check src tests benchmarks examples tools
	$(BIN)/mypy
	$(BIN)/lint-imports

.venv/python:
	$(PYTHON) -m venv .venv
	touch $@

.venv/core: .venv/python requirements.lock pyproject.toml
	$(BIN)/pip install --quiet --no-deps -r requirements.lock
	$(BIN)/pip install --quiet --no-deps -e .
	touch $@

.venv/dev: .venv/python requirements-dev.lock pyproject.toml
	$(BIN)/pip install --quiet --no-deps -r requirements-dev.lock
	$(BIN)/pip install --quiet --no-deps -e .
	touch $@ .venv/core

clean:
	rm -rf .venv runs
