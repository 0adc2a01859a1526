# The one door: the same words here and in CI.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: install train test lint bench truths curves crowd soak docs gpu-check gpu-bundle clean

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

# learning curves, and variants of what `make test` learns once
curves: install
	$(BIN)/python -m pytest -q -m long

# many workers: 200 connections of 10 environments at 10 Hz for two minutes; 500 comings and goings; two minutes of a bad network
crowd: install
	SEEDRL_CROWD=200x10x120 SEEDRL_CYCLES=500 $(BIN)/python -m pytest -q tests/system/test_many.py
	SEEDRL_PROXY_SECONDS=120 $(BIN)/python -m pytest -q -m "long or not long" tests/system/test_remote.py -k "bad_network"

# steps a second beside the bare loop and what one would pick instead, sweeps, and training side by side with a plain loop: an hour, on an idle machine
bench: install
	$(BIN)/python benchmarks/table.py
	$(BIN)/python benchmarks/peers.py
	$(BIN)/python benchmarks/training.py
	for what in breakeven slots telemetry; do $(BIN)/python benchmarks/sweeps.py $$what || exit 1; done
	$(BIN)/python benchmarks/side_by_side.py --seeds 1 2 3
	$(BIN)/python benchmarks/side_by_side.py --seeds 1 2 --step-us 200

# the long forms of what `make test` does briefly
truths: install
	SEEDRL_TRUTH_ROWS=1000000 $(BIN)/python -m pytest -q tests/system/test_truths.py
	SEEDRL_INSTANTS=20 SEEDRL_LEFTOVER_ROUNDS=20 $(BIN)/python -m pytest -q tests/system/test_faults.py tests/system/test_serve.py -k "ctrl_c or leftovers"
	SEEDRL_TORN_INSTANTS=50 $(BIN)/python -m pytest -q tests/store/test_checkpoint.py -k kill_9
	SEEDRL_FAT_SECONDS=300 $(BIN)/python -m pytest -q tests/system/test_seeds.py -k FatInfos
	SEEDRL_FLAT_SECONDS=600 $(BIN)/python -m pytest -q tests/system/test_serve.py -k "case_20 and 4"
	SEEDRL_TRUTH_ROWS=300000 $(BIN)/python -m pytest -q tests/system/test_kept_rows.py -k every_draw
	SEEDRL_TREE_UPDATES=10000000 $(BIN)/python -m pytest -q tests/store/test_sum_tree.py
	SEEDRL_KILLS=100 $(BIN)/python -m pytest -q tests/store/test_kept.py -k killed
	SEEDRL_TORN_S=300 $(BIN)/python -m pytest -q -s tests/store/test_ring.py -k two_processes

SECONDS ?= 600
soak: install
	$(BIN)/seedrl train cartpole run.stop_at_return=null run.max_seconds=$(SECONDS)

# with the host's own interpreter, torch and CuPy: make gpu-check PYTHON=python3; says "skipped" where no GPU is. What else it needs comes from
# build/gpu-bundle, if that was made beforehand where there is a network: make gpu-bundle GPU_PYTHON=3.12
gpu-check:
	test ! -d build/gpu-bundle || test -d build/gpu-site || $(PYTHON) -m pip install -q --no-index --no-deps --target build/gpu-site build/gpu-bundle/*.whl
	PYTHONPATH=.:build/gpu-site $(PYTHON) benchmarks/gpu_check.py

GPU_PYTHON ?= 3.11
gpu-bundle: install
	$(BIN)/python benchmarks/gpu_bundle.py build/gpu-bundle --python $(GPU_PYTHON)

# the site, in build/site: a dead link or a page without a place is an error
docs: install
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
