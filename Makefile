# `make demo` and `make test` each start from a bare machine with Python >= 3.11.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint install golden clean

demo: install
	$(BIN)/python -m planner demo

test: install lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

golden: install  # write the expected emitted programs anew; read the diff before committing
	MESHWRIGHT_REGENERATE=1 $(BIN)/python -m pytest -q tests/test_emit.py

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed, this is " + sys.version'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[hf,dev]'
	touch $(INSTALLED)

clean:
	rm -rf $(VENV)
