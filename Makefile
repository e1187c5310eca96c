# Every target makes its own virtual environment first; nothing but python3 and the package index is needed.
VENV ?= .venv
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.installed

.PHONY: demo test lint bench mutate clean

demo: $(READY)
	$(PYTHON) examples/quickstart.py

test: $(READY)
	$(PYTHON) -m pytest -q

lint: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	$(VENV)/bin/lint-imports

bench: $(READY)
	$(PYTHON) benchmarks/ragged_cpu.py
	$(PYTHON) benchmarks/scheduler.py

mutate: $(READY)
	$(PYTHON) tools/mutate.py

# torch first and pinned: an unpinned one may bring gigabytes of CUDA to a machine without a GPU.
$(READY): pyproject.toml
	python3 -m venv $(VENV)
	$(PYTHON) -m pip install --quiet torch==2.13.0
	$(PYTHON) -m pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .hypothesis .ruff_cache .mypy_cache .import_linter_cache build *.egg-info
