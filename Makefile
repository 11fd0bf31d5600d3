# Two commands do everything: `make demo` and `make test`. Both start from a bare clone.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help setup demo check test bench results clean
help:
	@echo "make demo    set up, cook real soups on embedded data, show table and report"
	@echo "make test    set up, run the checks and all tests"
	@echo "make check   format, lint, types, layering"
	@echo "make bench   CPU benchmarks, about two minutes"
	@echo "make results docs/results.md and its figures from experiments/results/"
	@echo "make clean   remove the environment"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade -c constraints.txt pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup
	$(BIN)/stockpot demo --out demo

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_architecture.py

test: check
	$(BIN)/python -m pytest

bench: setup
	$(BIN)/python benchmarks/cpu_step.py
	$(BIN)/python benchmarks/build_uniform.py --repeat 1

results: setup
	$(BIN)/python experiments/results.py

clean:
	rm -rf $(VENV)
