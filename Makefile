# make demo: set up and watch a killed rank come back.   make test: set up, lint, type-check, test.   make bench: figures.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-all bench lint system clean

demo: $(READY)
	@$(BIN)/python examples/demo.py

test: lint system
	$(BIN)/python -m pytest -n 3 --dist worksteal --durations=60 tests

test-all: lint system
	HOLDFAST_SCHEDULES=100 $(BIN)/python -m pytest -n 2 -m "long or not long" tests

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

system:
	@tools/system-packages

bench: $(READY)
	$(BIN)/python -m bench

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "holdfast needs Python 3.11 or newer; name one with make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .bench-venv dist build
