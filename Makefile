# Every target makes its own virtual environment first; nothing but python3 and the package index is needed.
VENV ?= .venv
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.installed
CALLERS_READY := $(VENV)/.callers-installed
# For run_all.py. On a GPU: make bench BENCH='--models 0.6B 8B --ab all'; without one it only shows that it runs.
BENCH ?= --models tiny --scale 0.02 --batches 4

.PHONY: demo test test-slow test-callers lint bench mutate clean

demo: $(READY)
	$(PYTHON) examples/quickstart.py

# A process a core, one thread each: on two cores twice as fast as one process.
test: $(READY)
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q -n auto --dist worksteal

# What `test` leaves out: whole programs, and what lasts minutes.
test-slow: $(READY)
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q -n auto --dist worksteal -m 'slow and not gpu'

# Other people's programs over an enabled model: all of tests/callers, also what `test` leaves out.
test-callers: $(CALLERS_READY)
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q -n auto --dist worksteal -m 'not gpu' tests/callers

lint: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	$(VENV)/bin/lint-imports

bench: $(READY)
	$(PYTHON) benchmarks/ragged_cpu.py
	$(PYTHON) benchmarks/scheduler.py
	$(PYTHON) benchmarks/host_cost.py
	$(PYTHON) benchmarks/run_all.py $(BENCH)

mutate: $(READY)
	$(PYTHON) tools/mutate.py

# torch first and pinned: an unpinned one may bring gigabytes of CUDA to a machine without a GPU.
$(READY): pyproject.toml
	python3 -m venv $(VENV)
	$(PYTHON) -m pip install --quiet torch==2.13.0
	$(PYTHON) -m pip install --quiet --editable '.[dev,bench]'
	touch $@

# torch stays the pinned one; some of the programs hold back other packages, which pip then takes in an older version.
$(CALLERS_READY): $(READY)
	$(PYTHON) -m pip install --quiet torch==2.13.0 --editable '.[dev,bench,callers]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .hypothesis .ruff_cache .mypy_cache .import_linter_cache build *.egg-info
