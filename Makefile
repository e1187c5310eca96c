# Every target makes its own virtual environment first; nothing but python3 and the package index is needed.
VENV ?= .venv
ifneq ($(words $(VENV)),1)
$(error VENV=$(VENV): expected a path without spaces, which make takes for several files)
endif
PYTHON := $(VENV)/bin/python
# For run_all.py. On a GPU: make bench BENCH='--models 0.6B 8B --ab all'; without one it only shows that it runs.
BENCH ?= --models tiny --scale 0.02 --batches 4

# KERNELS=avx512, avx2 or sse: tests compute with the kernels that torch, oneDNN, MKL and OpenBLAS (numpy, and so
# Triton's interpreter) have for a processor with no more than that. Sums of another order round otherwise.
KERNELS ?= own
SETTINGS_own :=
SETTINGS_avx512 := ATEN_CPU_CAPABILITY=avx512 ONEDNN_MAX_CPU_ISA=AVX512_CORE OPENBLAS_CORETYPE=SkylakeX
SETTINGS_avx2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_CBWR=AVX2 OPENBLAS_CORETYPE=Haswell
SETTINGS_sse := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE OPENBLAS_CORETYPE=Nehalem
ifeq ($(filter $(KERNELS),own avx512 avx2 sse),)
$(error KERNELS=$(KERNELS): expected own, avx512, avx2 or sse)
endif
# A process a core, one thread each: on two cores twice as fast as one process. With worksteal each has a run of whole
# modules, so that few of their fixtures are made twice.
PYTEST := env $(SETTINGS_$(KERNELS)) OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q -n auto --dist worksteal
# Bytecode is written also where the caller's environment forbids it, and not between the sources: without it each of the
# processes that tests start compiles all of torch and transformers, 5 s of a processor.
export PYTHONPYCACHEPREFIX := $(abspath $(VENV))/bytecode
unexport PYTHONDONTWRITEBYTECODE

# torch is pinned. Without a GPU it comes from torch's own index, since PyPI's brings gigabytes of CUDA.
TORCH ?= torch==2.13.0
CPU_INDEX := $(if $(shell command -v nvidia-smi),,--retries 1 --extra-index-url https://download.pytorch.org/whl/cpu)
PIP_INSTALL := -m pip install --quiet --no-compile
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The oldest transformers that pyproject.toml allows, in an environment of its own.
OLDEST := $(VENV)/oldest
OLDEST_TRANSFORMERS := $(shell sed -n 's/.*"transformers>=\([0-9.]*\).*/\1/p' pyproject.toml).0

.PHONY: demo test test-kernels test-slow test-oldest test-callers test-wheel callers lint bench mutate clean

demo: $(VENV)/.demo
	$(PYTHON) examples/quickstart.py

# The core tier. Programs of tests/callers are not even imported: `test-slow` and `test-callers` run them.
test: $(VENV)/.test
	$(PYTEST) --ignore tests/callers

# `test` as on other processors: each kind of kernels that this one can run.
test-kernels:
	for kernels in sse avx2 $$(grep -qw avx512f /proc/cpuinfo && echo avx512); do \
		$(MAKE) test KERNELS=$$kernels || exit; done

# What `test` leaves out: whole programs, and further cases of what it tests.
test-slow: $(VENV)/.test
	$(PYTEST) -m 'slow and not core and not gpu'

# What reads transformers' own code, beside the oldest version of it that is supported: the core tier of these folders.
test-oldest: $(OLDEST)/.installed
	$(subst $(PYTHON),$(OLDEST)/bin/python,$(PYTEST)) tests/integration tests/guards tests/options

# Other people's programs over an enabled model: all of tests/callers, also what `test` leaves out.
test-callers: $(VENV)/.more-callers
	$(PYTEST) -m 'not gpu' tests/callers

# The wheel in an empty environment for each of these versions of torch.
WHEEL_TORCHES ?= 2.11.0 2.13.0 2.14.1
test-wheel: $(VENV)/.test
	WHEEL_TORCHES='$(WHEEL_TORCHES)' $(PYTHON) -m pytest -q -m slow tests/test_wheel.py

# Programs whose tests `test` and `test-slow` skip without them.
callers: $(VENV)/.callers

lint: $(VENV)/.test
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	$(VENV)/bin/lint-imports

bench: $(VENV)/.test
	$(PYTHON) benchmarks/ragged_cpu.py
	$(PYTHON) benchmarks/scheduler.py
	$(PYTHON) benchmarks/host_cost.py
	$(PYTHON) benchmarks/run_all.py $(BENCH)

mutate: $(VENV)/.test
	$(PYTHON) tools/mutate.py

# -- the environment, in steps: each target installs what it uses ------------------------------------------------------

$(VENV)/.torch:
	python3 -m venv $(VENV)
	$(PYTHON) $(PIP_INSTALL) $(CPU_INDEX) $(TORCH)
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(PYTHON) $(PIP_INSTALL) --editable '.[demo]'
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(PYTHON) $(PIP_INSTALL) --editable '.[dev,bench]'
	touch $@

$(VENV)/.callers: $(VENV)/.test
	$(PYTHON) $(PIP_INSTALL) --editable '.[dev,bench,callers]'
	touch $@

# Some of the programs hold back other packages, which pip then takes in an older version; torch stays the pinned one.
$(VENV)/.more-callers: $(VENV)/.callers
	$(PYTHON) $(PIP_INSTALL) $(TORCH) --editable '.[dev,bench,more-callers]'
	touch $@

# An environment that has transformers, and what that holds back, of its own; all else it finds in the first one.
$(OLDEST)/.installed: $(VENV)/.test
	python3 -m venv $(OLDEST)
	echo "import site; site.addsitedir('$$(echo $(abspath $(VENV))/lib/python*/site-packages)')" \
		> $$(echo $(OLDEST)/lib/python*/site-packages)/base.pth
	$(OLDEST)/bin/python $(PIP_INSTALL) transformers==$(OLDEST_TRANSFORMERS)
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .hypothesis .ruff_cache .mypy_cache .import_linter_cache build *.egg-info
