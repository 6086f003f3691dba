# `make demo`, `make test` and `make test-oldest` each start from a bare machine with Python >= 3.11.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
OLDEST_VENV ?= .venv-oldest
OLDEST_INSTALLED := $(OLDEST_VENV)/.installed
# Processes that tests start read what the first of them compiled, also where the surroundings forbid to write it.
# Three processes of pytest for two processors: one often waits for ranks that wait for each other.
RUN_TESTS = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(1)/bin/python -m pytest -q -n 3 --dist worksteal --durations=40 --durations-min=5

.PHONY: demo test run-tests test-oldest lint docs browser install golden clean

demo: install
	$(BIN)/python -m planner demo

test: install browser
	$(MAKE) -j 2 lint docs run-tests  # mypy keeps one processor busy for over a minute

run-tests: install
	$(call RUN_TESTS,$(VENV))

test-oldest: $(OLDEST_INSTALLED)  # the suite with the oldest torch and transformers that are supported
	$(call RUN_TESTS,$(OLDEST_VENV))

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: install  # the pages of docs/ as a site in site/, links checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

browser:  # Chromium for the tests of the HTML report, which say so where it cannot be had
	command -v chromium chromedriver || { apt-get update -q && apt-get install -y -q --no-install-recommends chromium chromium-driver; } || echo "no Chromium: the report is not tested in a browser"

golden: install  # write the expected emitted programs anew; read the diff before committing
	MESHWRIGHT_REGENERATE=1 $(BIN)/python -m pytest -q tests/test_emit.py

install: $(INSTALLED)

# $(1): folder of the virtual environment, $(2): constraints. Most modules are never imported: who imports one compiles it.
define INSTALL
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed, this is " + sys.version'
	$(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install --quiet --no-compile --constraint $(2) torch
	$(1)/bin/python -m pip install --quiet --no-compile --constraint $(2) --editable '.[hf,dev]'
	touch $(1)/.installed
endef

$(INSTALLED): pyproject.toml constraints.txt
	$(call INSTALL,$(VENV),constraints.txt)

$(OLDEST_INSTALLED): pyproject.toml constraints.txt constraints-oldest.txt
	$(call INSTALL,$(OLDEST_VENV),constraints-oldest.txt)

clean:
	rm -rf $(VENV) $(OLDEST_VENV)
