# Everything starts here: `make demo`, `make test`. Each target sets up what it needs; a second run is quick.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PY := .venv/bin/python
JOBS ?= $(shell nproc)
export PYTHONPATH := $(CURDIR)/python
# Objects built with a precompiled header are cached too.
export CCACHE_SLOPPINESS ?= pch_defines,time_macros,include_file_mtime,include_file_ctime
export CCACHE_BASEDIR ?= $(CURDIR)

CXX_FILES = $(shell git ls-files --cached --others --exclude-standard 'csrc/*.cpp' 'csrc/*.h' 'include/*.h' 'tests/unit/*.cpp' 'tests/unit/*.h' 'examples/*.cpp')
PYTHON_DIRS = python tests examples tools

.PHONY: help setup build build-pure cpp-tests asan-tests py-tests test demo bench wheel docs format lint clean

help:  ## List the targets.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup:  ## Install Debian packages and .venv with PyTorch 2.13.0.
	@bash tools/setup.sh

build/release/build.ninja: | setup
	cmake --preset release -DPython_EXECUTABLE=$(CURDIR)/$(PY)

build: setup build/release/build.ninja  ## Build libkiln and kiln._C, and make `import kiln` work in .venv.
	cmake --build --preset release -j $(JOBS)
	@$(PY) tools/dev_install.py

cpp-tests: build  ## Run the C++ unit tests.
	ctest --test-dir build/release --output-on-failure

build/asan/build.ninja: | setup
	cmake --preset asan -DPython_EXECUTABLE=$(CURDIR)/$(PY)

asan-tests: setup build/asan/build.ninja  ## Run the unit tests of the pure layers under asan and ubsan.
	cmake --build --preset asan -j $(JOBS)
	ASAN_OPTIONS=detect_leaks=0 ctest --test-dir build/asan --output-on-failure

py-tests: build  ## Run the Python tests (ARGS='...' goes to pytest).
	$(PY) -m pytest $(ARGS)

test: cpp-tests asan-tests py-tests  ## Set up, build, and run all tests: C++, sanitizers, Python.

demo: build  ## Train a ResNet and a GPT in eager and in kiln, and write demo/report.html.
	$(PY) examples/demo/main.py

bench: build  ## Measure the published figures against eager and torch.compile.
	$(PY) -m kiln bench --suite figures --out bench-results $(ARGS)

wheel: setup  ## Build the wheel into dist/.
	$(PY) -m pip wheel . --no-build-isolation --no-deps -w dist -q --disable-pip-version-check
	@$(PY) tools/check_wheel.py dist/*.whl

docs: build  ## Write the reference pages that are made from the tables.
	$(PY) tools/gen_docs.py

format:  ## Format C++ and Python.
	@[ -z "$(CXX_FILES)" ] || clang-format-19 -i $(CXX_FILES)
	$(PY) -m ruff check -q --fix $(PYTHON_DIRS)
	$(PY) -m ruff format -q $(PYTHON_DIRS)

lint: setup  ## Check layers, formatting and generated pages.
	$(PY) tools/check_layers.py
	$(PY) tools/gen_docs.py --check
	clang-format-19 --dry-run --Werror $(CXX_FILES)
	$(PY) -m ruff check -q $(PYTHON_DIRS)
	$(PY) -m ruff format -q --check $(PYTHON_DIRS)

clean:  ## Remove what was built (not .venv).
	rm -rf build dist python/kiln/*.so python/kiln/_build_info.py python/*.dist-info
