# The one door: the same words here and in CI.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: install train test lint bench clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "seedrl needs Python 3.11 or newer: make install PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@touch $@

train: install
	$(BIN)/seedrl train cartpole

test: install lint
	$(BIN)/python -m pytest -q

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

ifneq ($(wildcard benchmarks/vtrace_loop.py),)
bench: install
	$(BIN)/python benchmarks/vtrace_loop.py
endif

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
