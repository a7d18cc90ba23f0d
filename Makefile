# Each target stands alone: it makes the environment, builds the wheel and installs it there, unless that is done already.
# PYTHON is what a new environment is made with; ARGS go to what demo, test, smoke, bench and
# gpu-check's benchmark run.
PYTHON ?= python3
TORCH ?= torch>=2.10
VENV ?= .venv
ARGS ?=

BIN := $(abspath $(VENV))/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := setup.py pyproject.toml README.md LICENSE $(sort $(shell find csrc fused_kernels -type f ! -name '*.pyc'))
SETTINGS := $(foreach name,PYTHON FUSED_KERNELS_CUDA TORCH_CUDA_ARCH_LIST CUDA_HOME CUDA_PATH,$(name)=$($(name)))

# From an empty folder, so that it is the installed wheel that gets imported and never the source tree.
outside = folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && cd "$$folder" &&

.PHONY: demo test smoke lint bench wheel ci clean FORCE

demo: $(VENV)/.wheel
	$(outside) $(BIN)/python -m fused_kernels.bench --demo $(ARGS)

test: $(VENV)/.wheel
	$(outside) $(BIN)/python -m pytest $(CURDIR)/tests $(ARGS)

smoke: $(VENV)/.wheel
	$(outside) $(BIN)/python -m pytest -m smoke $(CURDIR)/tests $(ARGS)

# -I keeps the source tree out, too, and paths in ARGS start here.
bench: $(VENV)/.wheel
	$(BIN)/python -I -m fused_kernels.bench $(ARGS)

wheel: dist/.built

lint: $(VENV)/.lint
	$(BIN)/pre-commit run --all-files --show-diff-on-failure

# The wheel built with one torch is also tried with the CUDA build of another. Three architectures stand for all, to save
# minutes: the oldest, the first with clusters and bulk copies, the newest.
ci: export FUSED_KERNELS_CUDA ?= $(if $(shell command -v nvcc 2>/dev/null),1)
ci: export TORCH_CUDA_ARCH_LIST ?= 7.5;9.0;12.0+PTX
ci:
	$(MAKE) lint
	$(MAKE) test TORCH=torch==2.13.0
	$(MAKE) smoke TORCH=torch==2.14.1 VENV=.venv-other-torch

clean:
	rm -rf build dist *.egg-info

# ---- environment and wheel; the stamps in $(VENV) say what is done, those of FORCE hold what it was done with
$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "fused_kernels needs Python 3.10 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet 'pip>=25.1' # for --group
	@touch $@

$(VENV)/.lint: pyproject.toml | $(VENV)/.python
	$(PIP) install --quiet --group lint
	@touch $@

$(VENV)/.torch: FORCE | $(VENV)/.python
	@echo '$(TORCH)' | cmp -s - $@ || (set -x && $(PIP) install '$(TORCH)' && echo '$(TORCH)' >$@)

$(VENV)/.tools: pyproject.toml | $(VENV)/.torch
	$(PIP) install --quiet --group build --group test
	@touch $@

dist/.inputs: FORCE
	@mkdir -p dist && (echo '$(SETTINGS) $(SOURCES)' | cmp -s - $@ || echo '$(SETTINGS) $(SOURCES)' >$@)

dist/.built: dist/.inputs $(SOURCES) | $(VENV)/.tools
	rm -rf build/lib* # it would keep files that the sources no longer have
	@echo 'Compiling: minutes, if with CUDA for every architecture; TORCH_CUDA_ARCH_LIST=9.0, say, is one'
	PATH="$(BIN):$$PATH" $(PIP) wheel --no-deps --no-build-isolation -w dist .
	@touch $@

$(VENV)/.wheel: dist/.built | $(VENV)/.tools
	$(PIP) install --no-deps --no-index --find-links dist --force-reinstall fused_kernels
	@$(outside) $(BIN)/python -c 'import fused_kernels; print(fused_kernels.build_info())'
	@touch $@

# ---- on a machine with a GPU: its own Python and torch as they are, nothing fetched
GPU := $(abspath build/gpu-check)
OUT ?= $(GPU)
# Side by side, a sanitizer's processes get in each other's way sooner than those of the tests: fewer of them, then.
SANITIZED_ADDOPTS ?= $(PYTEST_ADDOPTS)
GPU_STEPS := build test properties memcheck racecheck initcheck synccheck bench
GPU_NEEDS := torch numpy pybind11 setuptools pytest hypothesis rich
gpu_python = $(outside) PYTHONPATH=$(GPU)/site $(PYTHON)
sanitizer = $(or $(shell command -v compute-sanitizer 2>/dev/null),/usr/local/cuda/bin/compute-sanitizer)
# Without torch's caching allocator, memcheck knows where each tensor ends; only this package's kernels are instrumented.
sanitize = $(outside) PYTHONPATH=$(GPU)/site PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(sanitizer) --error-exitcode 1 \
    --kernel-name kns=fused --tool
sanitized = sanitize and cuda
sanitized_tests = $(PYTHON) -m pytest -m "$(sanitized)" $(CURDIR)/tests

.PHONY: gpu-check $(addprefix gpu-,$(GPU_STEPS))

gpu-check:
	@rm -rf $(GPU) && mkdir -p $(GPU) $(OUT)
	@for step in $(GPU_STEPS); do \
	    start=$$(date +%s); \
	    if $(MAKE) --no-print-directory gpu-$$step; then verdict=pass; else verdict=FAIL; fi; \
	    printf '%-10s %s %5d s\n' $$step $$verdict $$(($$(date +%s) - start)) >>$(GPU)/summary; \
	    if [ $$step$$verdict = buildFAIL ]; then break; fi; \
	done
	@echo; cat $(GPU)/summary; if [ -f $(OUT)/gpu.txt ]; then cat $(OUT)/gpu.txt; fi; ! grep -q FAIL $(GPU)/summary

gpu-build:
	@$(PYTHON) -c 'import sys; from importlib.util import find_spec; \
	    missing = [name for name in "$(GPU_NEEDS)".split() if not find_spec(name)]; \
	    sys.exit("gpu-check fetches nothing, and $(PYTHON) lacks " + ", ".join(missing) if missing else 0)'
	@$(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and "gpu-check: torch sees no CUDA device")'
	export FUSED_KERNELS_CUDA=1 TORCH_CUDA_ARCH_LIST="$${TORCH_CUDA_ARCH_LIST:-$$( \
	    nvidia-smi --query-gpu=compute_cap --format=csv,noheader | sort -u | paste -sd ';')}" && \
	    $(PYTHON) -m pip wheel --no-deps --no-build-isolation -w $(GPU) .
	$(PYTHON) -m pip install --no-deps --no-index --find-links $(GPU) --target $(GPU)/site --upgrade fused_kernels
	@$(gpu_python) -c 'import fused_kernels; print(fused_kernels.build_info())'

gpu-test:
	$(gpu_python) -m pytest $(CURDIR)/tests

gpu-properties: export FUSED_KERNELS_EXAMPLES ?= 3000
gpu-properties:
	$(gpu_python) -m pytest -m "properties and cuda" --hypothesis-show-statistics $(CURDIR)/tests

gpu-memcheck gpu-racecheck gpu-synccheck gpu-initcheck: export PYTEST_ADDOPTS := $(SANITIZED_ADDOPTS)
gpu-racecheck: sanitized += and not slow
gpu-memcheck gpu-racecheck gpu-synccheck: gpu-%:
	$(sanitize) $* $(sanitized_tests)

# Here every kernel has to be instrumented, or memory that torch's have written would count as never written; and copies to
# the host stay unchecked. Only what this package's kernels read decides.
gpu-initcheck:
	@log=$(GPU)/initcheck.log; ($(outside) PYTHONPATH=$(GPU)/site PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(sanitizer) \
	    --tool initcheck --check-api-memory-access no --show-backtrace no --print-limit 0 $(sanitized_tests)) >$$log 2>&1; \
	    status=$$?; grep -v ^========= $$log; if grep 'at .*fused::' $$log; then exit 1; fi; exit $$status

gpu-bench:
	$(outside) COLUMNS=160 PYTHONPATH=$(GPU)/site $(PYTHON) -m fused_kernels.bench --device cuda $(ARGS) \
	    --json $(abspath $(OUT))/gpu.json >$(abspath $(OUT))/gpu.txt
