# Two commands for everyone:   make demo   (train a real model)      make test   (run the tests)
# Both set up .venv on their first run. Variables to override:
#   TORCH   which torch to install, anything pip accepts        make demo TORCH='torch==2.14.*'
#   PYTHON  the interpreter that .venv is made with             make test PYTHON=python3.12
#   ARGS    passed on to the program or to pytest               make demo ARGS='--stage 2'
#   JOBS    processes that run tests at a time                  make test JOBS=1
#   NPROC   ranks that `make demo` starts on this machine       make demo NPROC=4

TORCH  ?= torch==2.13.0
PYTHON ?= python3
CXX    ?= g++
NPROC  ?= 2
JOBS   ?= 2
ARGS   ?=

VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile
STAMP  := $(VENV)/stamp
# The requirement is part of the name, so that asking for another torch installs it.
TORCH_STAMP := $(STAMP)/torch-$(shell printf '%s' '$(TORCH)' | tr -c 'A-Za-z0-9.' '_')

# Most of what is installed is never imported; what is imported is compiled then, and kept.
unexport PYTHONDONTWRITEBYTECODE
# One thread per rank: two ranks on two cores otherwise fight over both.
export OMP_NUM_THREADS ?= 1
# Type checking runs on the node that the dev extra installs, whatever the system has.
export PYRIGHT_PYTHON_GLOBAL_NODE ?= 0

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint

help:
	@sed -n '1,7s/^# \{0,1\}//p' Makefile

setup: $(STAMP)/dev

demo: $(STAMP)/hf
	$(BIN)/torchrun --nproc-per-node $(NPROC) examples/finetune_smollm2.py $(ARGS)

test: $(STAMP)/dev
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal $(ARGS)

lint: $(STAMP)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff check --config .ci/ruff-pure.toml zerofx/passes zerofx/cost
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

$(STAMP)/hf: $(TORCH_STAMP) $(STAMP)/compiler pyproject.toml
	$(PIP) '$(TORCH)' --editable '.[hf]'
	@touch $@

$(STAMP)/dev: $(TORCH_STAMP) $(STAMP)/compiler pyproject.toml
	$(PIP) '$(TORCH)' --editable '.[hf,dev]'
	@touch $@ $(STAMP)/hf

$(TORCH_STAMP): | $(STAMP)/venv
	@rm -f $(STAMP)/torch-*
	@echo 'Installing $(TORCH) into $(VENV) (once; a download of some hundred megabytes or more)'
	$(PIP) '$(TORCH)'
	@touch $@

# torch.compile builds C++ for CPUs: better to say so now than in a traceback after the download.
$(STAMP)/compiler: | $(STAMP)/venv
	@printf '#include <Python.h>\n#include <omp.h>\nint main() { return 0; }\n' \
	  | $(CXX) -fopenmp -fsyntax-only -x c++ \
	      -I"$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))')" - \
	  || { echo 'zerofx needs a C++ compiler with OpenMP and the Python headers:' \
	            'on Debian or Ubuntu, sudo apt-get install g++ python3-dev' >&2; exit 1; }
	@touch $@

$(STAMP)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo 'zerofx needs Python 3.11 or newer: add PYTHON=/path/to/python3.11' >&2; exit 1; }
	$(PYTHON) -m venv --upgrade-deps $(VENV)
	@mkdir -p $(STAMP) && touch $@
