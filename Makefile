# make demo      both packages on real data: two tables and a picture
# make test      all but the slow tests, with real ranks under horovodrun
# make test-all  all tests
# make setup     everything into .venv: torch, TensorFlow, this project, and a Horovod built for them
# make check     lint, format, types
# make docs      the site, into site/index.html: warnings are errors
# make gpu       test and measure everything on a GPU in ten minutes; downloads nothing
# make gpu-dry   the same script on the CPU, to check that it runs
# make fuzz      damaged payloads, states, plans and problems; generated programs: make fuzz MINUTES=30
# make bench     the quick benchmark
# make clean     removes .venv and builds; keeps .cache
#
# Each step leaves a stamp in .venv, so nothing is done twice. To build against other versions:
#   make setup PYTHON=python3.12 TORCH='torch==2.9.*' TENSORFLOW= CONSTRAINTS=

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TENSORFLOW ?= tensorflow-cpu==2.21.0
CONSTRAINTS ?= requirements/ci.txt
# Number of pytest-xdist processes; one of them runs all tests that start ranks, one by one.
TEST_WORKERS ?= 2
PYTEST_ARGS ?=
# What `make test` selects by marks.
TESTS ?= not slow

BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAGE := scripts/stage.sh $(VENV)/logs
CONSTRAIN := $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
CSRC := $(wildcard csrc/* csrc/*/*)  # folders too: their times change when a file is removed
HOROVOD_SCRIPTS := scripts/build_horovod.py $(wildcard scripts/horovod_*.py)

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-changed check docs bench fuzz gpu gpu-dry clean data

help:
	@sed -n 's/^# make/make/p' Makefile

setup: $(STAMPS)/horovod $(STAMPS)/packages $(STAMPS)/extension $(STAMPS)/triton
	-@$(BIN)/python scripts/fetch_fashion_mnist.py

# Needs torch, this project and matplotlib; what else the tests need is not installed.
demo: $(STAMPS)/extension data
	@$(BIN)/python examples/demo.py

test: $(STAMPS)/horovod $(STAMPS)/packages $(STAMPS)/extension $(STAMPS)/triton
	-@$(BIN)/python scripts/fetch_fashion_mnist.py
	$(BIN)/python -m pytest -n $(TEST_WORKERS) -m "$(TESTS)" $(PYTEST_ARGS)

# All tests, as in continuous integration.
test-all: TESTS :=
test-all: test

# The tests that changes since SINCE concern, by imports.
SINCE ?= main
test-changed: $(STAMPS)/horovod $(STAMPS)/packages $(STAMPS)/extension $(STAMPS)/triton
	@files="$$($(BIN)/python scripts/changed_tests.py --since $(SINCE))" && echo "$$files" && \
	  { test -z "$$files" || $(BIN)/python -m pytest -n $(TEST_WORKERS) $(PYTEST_ARGS) $$files; }

check: $(STAMPS)/packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Opens from the file system: nothing is loaded from elsewhere, and search works.
docs: $(STAMPS)/packages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(STAMPS)/packages $(STAMPS)/extension
	mkdir -p benchmarks/out
	$(BIN)/python -m benchmarks codec --quick --json benchmarks/out/codec.json

# Every script of fuzz/, an equal part of the minutes each; fuzz/runner.py says what else there is.
MINUTES ?= 10
FUZZ_ARGS ?=
fuzz: $(STAMPS)/packages $(STAMPS)/extension
	PYTHONPATH=. $(BIN)/python fuzz/runner.py --minutes $(MINUTES) $(FUZZ_ARGS)

# On a machine with a GPU and torch, perhaps CuPy and Horovod, and perhaps no network: takes the
# python on the PATH and makes no environment. What is missing is said and left out; without a device
# the runner ends with 3 (make then with its own 2), or with 0 where GPU_REQUIRED=0. A Horovod that is
# not installed is taken of the wheels in GPU_WHEELS: scripts/build_horovod.py --carry lays them out.
GPU_PYTHON ?= python3
GPU_OUT ?= benchmarks/results/gpu
GPU_MINUTES ?= 10
GPU_REQUIRED ?= 1
GPU_WHEELS ?= .cache/gpu-wheels
GPU_ARGS ?=
gpu:
	PYTHONPATH=.:benchmarks $(GPU_PYTHON) -m gpu.runner --minutes $(GPU_MINUTES) \
	  --out $(GPU_OUT) --required $(GPU_REQUIRED) --wheels $(GPU_WHEELS) $(GPU_ARGS)

# Two minutes where it is quiet; the limit is for where it is not.
GPU_DRY_PYTHON ?= $(BIN)/python
gpu-dry: $(if $(filter $(BIN)/python,$(GPU_DRY_PYTHON)),$(STAMPS)/packages $(STAMPS)/extension)
	PYTHONPATH=.:benchmarks $(GPU_DRY_PYTHON) -m gpu.runner --device cpu --minutes 20 \
	  --out benchmarks/out/gpu-dry $(GPU_ARGS)

data: $(STAMPS)/venv
	@$(BIN)/python scripts/fetch_fashion_mnist.py

# .cache holds the built Horovod and the data set: both are slow to get and valid in any .venv.
clean:
	rm -rf $(VENV) build dist site *.egg-info sn_*/*.so sn_*/_*_missing.txt
	rm -rf benchmarks/out .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "need Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] \
	  + "; name another: make setup PYTHON=python3.12")'
	@$(STAGE)/venv.log "a virtual environment in $(VENV)" $(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS)
	@touch $@

# The build tools go in first: the project is then built with them, not with a fresh download.
$(STAMPS)/torch: $(STAMPS)/venv
	@$(STAGE)/torch.log "$(TORCH)" $(PIP) install $(CONSTRAIN) $(TORCH) 'setuptools>=77' wheel
	@touch $@

# The project with its C++ and matplotlib. Again when the C++ changes; the folder is listed too, so
# that a removed file counts.
$(STAMPS)/extension: $(STAMPS)/torch pyproject.toml setup.py $(CSRC)
	@$(STAGE)/extension.log "this project, its C++, NumPy, SciPy, matplotlib" \
	  $(PIP) install $(CONSTRAIN) --no-build-isolation --editable '.[report]'
	@touch $@

# What the tests need beside that. Changed C++ does not make these anew.
$(STAMPS)/packages: $(STAMPS)/torch pyproject.toml $(wildcard $(CONSTRAINTS)) | $(STAMPS)/extension
	@$(STAGE)/packages.log "$(TENSORFLOW) and the tools of the tests" \
	  $(PIP) install $(CONSTRAIN) $(TENSORFLOW) --no-build-isolation --editable '.[dev,horovod]'
	@touch $@

# For tests that interpret GPU kernels on the CPU. Outside of the environment's own packages, as
# torch's compiler does other things where it finds Triton.
$(STAMPS)/triton: $(STAMPS)/torch $(wildcard $(CONSTRAINTS))
	@$(STAGE)/triton.log "Triton, whose kernels tests interpret" \
	  $(PIP) install $(CONSTRAIN) --upgrade --no-deps --target $(VENV)/triton triton
	@touch $@

$(STAMPS)/horovod: $(STAMPS)/packages $(HOROVOD_SCRIPTS)
	@$(STAGE)/horovod.log "Horovod, built for these" $(BIN)/python scripts/build_horovod.py
	@touch $@
