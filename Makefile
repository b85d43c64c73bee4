# Each target does all the set-up it needs; the second call starts within seconds.
#
#   make demo     train the digits recipe on two ranks, in PyTorch and in Keras
#   make test     lint, types, fast tests, then tests with real ranks
#   make bench    the benchmarks
#   make docs     check the documentation
#   make lint     lint and types only
#
# Needs Python 3.11, a C++ compiler and make; .ci/setup.sh says what is missing. Variables:
#   PYTHON=python3.12          another interpreter
#   TORCH_INDEX=URL or none    where PyTorch comes from (see .ci/setup.sh)
#   TESTS="tests/launch -k x"  only these tests

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
TESTS ?= tests
SOURCES := hvdtrain tests examples benchmarks .ci/check_docs.py setup.py

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help setup demo test bench docs lint format freeze clean

help:
	@sed -n 's/^#   //p' Makefile

# A stamp is newer than what it depends on when the work was done.
$(VENV)/.packages: .ci/constraints.txt .ci/setup.sh setup.py
	@.ci/setup.sh packages
	@touch $@

# The build's changes decide what Horovod is; unchanged ones give the same key, and then this takes seconds.
$(VENV)/.horovod: $(VENV)/.packages hvdtrain/horovod/patches.py
	@.ci/setup.sh horovod
	@touch $@

setup: $(VENV)/.horovod

demo: setup
	@$(BIN)/python examples/demo.py

lint: $(VENV)/.packages
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/python .ci/check_docs.py

# Files of rank tests run in two processes: what shares emulated hosts or jobs stands in one file.
# pytest's exit code 5 means that TESTS selects none of this kind.
test: setup lint
	$(BIN)/python -m pytest -q -n auto -m "not ranks" $(TESTS) || [ $$? -eq 5 ]
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m ranks --durations=10 $(TESTS) || [ $$? -eq 5 ]

bench: setup
	@set -e; for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python "$$file"; done

docs: $(VENV)/.packages
	@$(BIN)/python .ci/check_docs.py

format: $(VENV)/.packages
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

# Writes the exact versions of this environment as the constraints of the next ones.
freeze: $(VENV)/.packages
	@sed -n '/^#/p' .ci/constraints.txt > .ci/constraints.new
	@$(BIN)/pip freeze --all --exclude setuptools --exclude wheel --exclude horovod --exclude hvdtrain \
		| grep '==' | sed 's/^\(torch==[0-9.]*\)+.*/\1/' >> .ci/constraints.new
	@mv .ci/constraints.new .ci/constraints.txt

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
