# SPDX-License-Identifier: Apache-2.0

PYTHON ?= python3
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
PIP_INSTALL := $(PY) -m pip --disable-pip-version-check install -qq
VENV_DONE := $(VENV)/.stamp-venv
DEPS_DONE := $(VENV)/.stamp-deps
CUDA_DONE := $(VENV)/.stamp-cuda
HEADERS_DONE := $(VENV)/.stamp-tensorrt-headers
SETUP_DONE := $(VENV)/.stamp-setup
PLUGIN_FILES := $(shell find plugins -type f 2>/dev/null)
PLUGIN_CODE := $(filter %.cu %.cuh %.cpp %.h,$(PLUGIN_FILES) $(wildcard tests/tensorrt/cpp/*))

# Developer build of the kernels. One architecture a folder, so that switching ARCH rebuilds nothing
# that is still good; the library itself is whatever was asked for last.
# Without ARCH: as last time.
ARCH ?= $(or $(patsubst build/kernels/.arch-%,%,$(firstword $(wildcard build/kernels/.arch-*))),90a)
SYSTEM_NVCC := $(firstword $(wildcard $(CUDA_HOME)/bin/nvcc /usr/local/cuda/bin/nvcc) \
	$(shell command -v nvcc 2>/dev/null))
NVCC ?= $(or $(SYSTEM_NVCC),$(lastword $(wildcard $(VENV)/lib/python*/site-packages/nvidia/cu*/bin/nvcc)),nvcc)
KERNEL_ARCHES := $(if $(filter all,$(ARCH)),90a 100a 120a,$(ARCH))
KERNEL_PTX := -gencode arch=compute_90,code=compute_90
KERNEL_FLAGS := -std=c++17 -O3 -lineinfo -Iplugins/include -Xcompiler -fPIC,-fvisibility=hidden,-Wall \
	$(foreach a,$(KERNEL_ARCHES),-gencode arch=compute_$(a),code=sm_$(a)) \
	$(if $(filter all,$(ARCH)),$(KERNEL_PTX))
KERNEL_OBJECTS := $(patsubst plugins/kernels/%.cu,build/kernels/$(ARCH)/%.o,$(wildcard plugins/kernels/*.cu))
KERNEL_LIBRARY := build/kernels/libspin.so

# The TensorRT plugin: the same kernels in a library of its own, which needs TensorRT's headers only.
TENSORRT_HEADERS = $(shell $(or $(wildcard $(PY)),$(PYTHON)) plugins/tensorrt/find_headers.py)
PLUGIN_OBJECTS := $(patsubst plugins/tensorrt/%,build/kernels/$(ARCH)/tensorrt/%.o,\
	$(wildcard plugins/tensorrt/*.cpp))
PLUGIN_LIBRARY := build/kernels/libspin_trt_plugin.so

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup library test lint fmt demo prove bench study study-quick beyond clean kernels plugin gpu-test gpu-bench

help: ## list the targets
	@echo "Usage: make TARGET [PYTHON=python3.x] [PYTEST_ARGS=...]"
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' Makefile | while IFS="$$(printf '\t')" read -r name text; do \
		printf '  %-11s %s\n' "$$name" "$$text"; done

setup: $(SETUP_DONE) ## create .venv with the pinned requirements and an editable install
	@:

# Where there is a CUDA compiler, setup has built the library already. Elsewhere one comes as wheels;
# the second make sees it.
library: setup ## the kernels and the plugin for every architecture, with a compiler from PyPI if need be
	@$(if $(SYSTEM_NVCC),:,$(MAKE) --no-print-directory $(CUDA_DONE))
	@$(if $(SYSTEM_NVCC),:,$(MAKE) --no-print-directory -j2 kernels plugin ARCH=all)

# Two files at a time, as CI has cores; torch would take all of them for each.
test: library ## ruff, mypy, then pytest with coverage
	@$(BIN)/ruff check --quiet
	@$(BIN)/mypy --no-error-summary
	@OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile --cov=spin_trtllm $(PYTEST_ARGS)

lint: setup ## every check that changes nothing: ruff, formats, mypy
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --quiet --diff
	@$(if $(PLUGIN_CODE),$(BIN)/clang-format --dry-run --Werror $(PLUGIN_CODE))
	@$(BIN)/mypy --no-error-summary

fmt: setup ## format Python and CUDA sources, fix what ruff can fix
	@$(BIN)/ruff check --quiet --fix --exit-zero
	@$(BIN)/ruff format --quiet
	@$(if $(PLUGIN_CODE),$(BIN)/clang-format -i $(PLUGIN_CODE))

demo: setup ## run the demo on a tiny model; results go to build/demo
	@$(PY) -m spin_trtllm.demo --output build/demo

prove: setup ## show that each regression test fails without its fix
	@$(PY) tests/prove_guards.py

bench: setup ## replay benchmark
	@$(PY) benchmarks/bench_replay.py

# Held-out text is no part of the repository: without a corpus the Apache License is the filler.
PART ?= quick
STUDY_ARGS ?= $(if $(wildcard build/tiny_model/corpus.zip),--corpus build/tiny_model/corpus.zip)

study: setup ## one part of the study (PART=name), resumed where it stopped; results in build/study
	@$(PY) -m benchmarks.study.run --part $(PART) --output build/study $(STUDY_ARGS)

study-quick: setup ## a small study on the CPU, in less than ten minutes on two cores
	@$(PY) -m benchmarks.study.run --part quick --output build/study-quick --device cpu
	@$(PY) -m benchmarks.study.report build/study-quick

beyond: setup ## variants beyond the paper at equal bytes, on one CPU core; results in build/beyond
	@$(PY) -m benchmarks.study.beyond --output build/beyond --corpus build/tiny_model/corpus.zip

# The two GPU targets run in the machine's own Python, which brings a torch built for its driver.
kernels: $(KERNEL_LIBRARY) ## build libspin.so for one architecture (ARCH=90a, 100a, 120a, or all)
	@:

plugin: $(PLUGIN_LIBRARY) ## build libspin_trt_plugin.so, SPIN's nodes for TensorRT (ARCH as for kernels)
	@:

# The plugin, too, where TensorRT's headers are: without it its tests skip themselves.
WITH_PLUGIN = $(if $(TENSORRT_HEADERS),$(MAKE) --no-print-directory plugin,:)
ON_GPU = SPIN_LIBRARY=$(CURDIR)/$(KERNEL_LIBRARY) PYTHONPATH=$(CURDIR) $(PYTHON)

gpu-test: kernels ## tests of the kernels on this machine's GPU
	@$(WITH_PLUGIN)
	@$(ON_GPU) -m pytest -p no:cacheprovider tests/gpu $(PYTEST_ARGS)

gpu-bench: kernels ## benchmarks on this machine's GPU: a step, alone, under the hook and in TensorRT's nodes
	@$(WITH_PLUGIN)
	@for name in step trtllm_step $(if $(TENSORRT_HEADERS),tensorrt_plugin); do \
		$(ON_GPU) benchmarks/bench_$$name.py || exit; done

clean: ## remove build outputs and caches (.venv stays)
	@rm -rf build dist *.egg-info .coverage htmlcov .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -name .venv -prune -o -name .git -prune -o -type d -name __pycache__ -exec rm -rf {} +

$(VENV_DONE):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || \
		{ echo "make: PYTHON=$(PYTHON) is not a Python 3.10 or newer; pass PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "make: $(PYTHON) has no venv module; install it (Debian: apt install python3-venv) or pass another PYTHON" >&2; exit 1; }
	@echo "setup: creating $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(CUDA_DONE): requirements/cuda.txt $(DEPS_DONE)
	@echo "setup: no CUDA compiler here, installing requirements/cuda.txt"
	@$(PIP_INSTALL) -r requirements/cuda.txt
	@touch $@

# Apart from the other packages: of this one only the headers are used, none of what it depends on.
$(HEADERS_DONE): requirements/plugin.txt $(VENV_DONE)
	@echo "setup: installing requirements/plugin.txt"
	@rm -rf $(VENV)/tensorrt-headers
	@$(PIP_INSTALL) --no-deps --target $(VENV)/tensorrt-headers -r requirements/plugin.txt
	@touch $@

$(DEPS_DONE): requirements/ci.txt $(VENV_DONE)
	@echo "setup: installing requirements/ci.txt"
	@$(PIP_INSTALL) -r requirements/ci.txt
	@touch $@

# A changed kernel rebuilds the library. --no-deps: what is missing from requirements/ci.txt shall
# fail in `pip check`, not arrive unpinned.
$(SETUP_DONE): pyproject.toml $(DEPS_DONE) $(HEADERS_DONE) $(PLUGIN_FILES)
	@echo "setup: installing spin-trtllm (editable)"
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP_INSTALL) --no-build-isolation --no-deps -e .
	@$(PY) -m pip --disable-pip-version-check check >/dev/null || $(PY) -m pip check
	@touch $@

build/kernels/$(ARCH)/%.o: plugins/kernels/%.cu
	@mkdir -p $(@D)
	@$(NVCC) $(KERNEL_FLAGS) -Xptxas -v -MMD -MP -MF $(@:.o=.d) -c $< -o $@ >$(@:.o=.log) 2>&1 || \
		{ cat $(@:.o=.log) >&2; exit 1; }

$(KERNEL_LIBRARY): $(KERNEL_OBJECTS) build/kernels/.arch-$(ARCH)
	@$(NVCC) -shared -cudart static -L$(dir $(NVCC))../lib $(KERNEL_OBJECTS) -o $@

build/kernels/$(ARCH)/tensorrt/%.o: plugins/tensorrt/%
	@mkdir -p $(@D)
	@$(if $(TENSORRT_HEADERS),:,echo "plugin: no TensorRT headers; install requirements/plugin.txt or set \
		TENSORRT_INCLUDE_DIR" >&2; exit 1)
	@$(NVCC) $(KERNEL_FLAGS) -isystem $(TENSORRT_HEADERS) -MMD -MP -MF $(@:.o=.d) -c $< -o $@

$(PLUGIN_LIBRARY): $(KERNEL_OBJECTS) $(PLUGIN_OBJECTS) plugins/tensorrt/exports.map build/kernels/.arch-$(ARCH)
	@$(NVCC) -shared -cudart static -L$(dir $(NVCC))../lib $(KERNEL_OBJECTS) $(PLUGIN_OBJECTS) \
		-Xlinker --version-script=plugins/tensorrt/exports.map -o $@

build/kernels/.arch-$(ARCH):
	@mkdir -p $(@D)
	@rm -f build/kernels/.arch-*
	@touch $@

-include $(KERNEL_OBJECTS:.o=.d) $(PLUGIN_OBJECTS:.o=.d)

# Test dependencies only, and no reason to fail: the tests of a wheel that cannot be had skip themselves.
TENSORRT_DONE := $(VENV)/.stamp-tensorrt

.PHONY: tensorrt
tensorrt: $(TENSORRT_DONE) ## TensorRT wheels for tests without a GPU (about 180 MB)
	@:

test: $(TENSORRT_DONE)

$(TENSORRT_DONE): requirements/tensorrt.txt $(DEPS_DONE)
	@all=yes; for name in lean-10 lean-11 rtx; do \
		echo "setup: installing requirements/tensorrt.txt, $$name"; \
		rm -rf $(VENV)/tensorrt/$$name; \
		sed -n "/^# $$name$$/,/^$$/p" $< >$(VENV)/.requirements-$$name; \
		$(PIP_INSTALL) --no-deps --target $(VENV)/tensorrt/$$name -r $(VENV)/.requirements-$$name || \
			{ all=; echo "setup: no $$name; its tests are skipped" >&2; }; done; \
	test -z "$$all" || touch $@

# A Triton server for tests and the demo. Where the wheel cannot be had, its tests skip themselves.
TRITON_DONE := $(VENV)/.stamp-triton
TRITON := SPIN_TRITONSERVER=$(CURDIR)/$(VENV)/triton

.PHONY: triton triton-demo triton-soak
triton: $(TRITON_DONE) ## the Triton server that PyPI has (about 75 MB)
	@:

test: $(TRITON_DONE)

triton-demo: setup $(TRITON_DONE) ## serve the tiny model with Triton and ask it; results go to build/triton-demo
	@$(TRITON) $(PY) -m spin_trtllm.triton_demo --output build/triton-demo

triton-soak: setup $(TRITON_DONE) ## Triton's cost, 6,400 requests of 32 clients, 10,000 good and bad ones
	@$(TRITON) $(PY) benchmarks/bench_triton.py

$(TRITON_DONE): requirements/triton.txt $(DEPS_DONE)
	@echo "setup: installing requirements/triton.txt"
	@rm -rf $(VENV)/triton
	@$(PIP_INSTALL) --no-deps --only-binary=:all: --target $(VENV)/triton -r $< && touch $@ || \
		echo "setup: no Triton server; its tests are skipped" >&2
