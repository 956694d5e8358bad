# What a person or CI repeats is a target here. `make help` lists them.
#   make run ARGS="--http-port 9000"      make test ARGS="tests/core -x"      make PYTHON=python3.12 install

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet install
LOCK   := requirements-dev.lock
ARGS   ?=

# Stamp files say what is installed already, so that a second run starts at once.
MADE      := $(VENV)/.made
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev

# An environment that no longer works (the folder was moved, its Python is gone) is made anew.
ifeq ($(shell $(BIN)/python -c 'print("works")' 2>/dev/null),)
$(MADE): FORCE
endif

.DEFAULT_GOAL := help
.PHONY: help install run test check format bench verify-queueing verify-scheduling lock clean FORCE

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(INSTALLED)  ## serve the embedded model `digits` on the default ports, in the foreground
	@exec $(BIN)/shoal serve digits $(ARGS)

test: $(INSTALLED_DEV)  ## run all tests
	@$(BIN)/python -m pytest $(ARGS)

install: $(INSTALLED_DEV)  ## environment in .venv with the package and what tests, tools and examples need

check: $(INSTALLED_DEV)  ## formatting, lint, types, import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED_DEV)  ## put the code into shape
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(INSTALLED_DEV)  ## benchmarks (needs wrk and a quiet machine); never part of the tests
	@$(BIN)/python -m benchmarks $(ARGS)

verify-queueing: $(INSTALLED_DEV)  ## simulated against closed-form queueing results
	@$(BIN)/python scripts/verify_queueing.py $(ARGS)

verify-scheduling: $(INSTALLED_DEV)  ## order, fairness, objectives, adaptive mode: simulated against their numbers
	@$(BIN)/python scripts/verify_scheduling.py $(ARGS)

lock: $(MADE)  ## upgrade the environment, and pin what it has in requirements-dev.lock
	$(PIP) --upgrade --upgrade-strategy eager --editable '.[dev]'
	$(BIN)/python scripts/lock.py
	@touch $(INSTALLED) $(INSTALLED_DEV)

clean:  ## remove the environment, caches and build results
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(MADE): scripts/make_venv.sh
	@sh scripts/make_venv.sh $(VENV) $(PYTHON)
	@touch $@

# The tested versions where this Python has them, else whatever satisfies pyproject.toml.
$(INSTALLED): $(MADE) pyproject.toml $(LOCK)
	@echo "installing Shoal into $(VENV)"
	@$(PIP) --constraint $(LOCK) --editable . || $(PIP) --editable .
	@touch $@

$(INSTALLED_DEV): $(MADE) pyproject.toml $(LOCK)
	@echo "installing Shoal and what its tests need into $(VENV)"
	@$(PIP) --requirement $(LOCK)
	@$(PIP) --no-deps --editable .
	@touch $@ $(INSTALLED)

FORCE:
