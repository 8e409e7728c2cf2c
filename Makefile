# make demo: set up and run the main job.   make test: set up and pass all tests, lint and types.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TOOLS := $(VENV)/.tools
export OMP_NUM_THREADS ?= 1
# Debian packages that tests need (network hosts, a browser), installed when we are root and apt is there.
DEBIAN := iproute2 openssl strace chromium etcd-server

.PHONY: demo test quick lint types unit bench conformance docs setup system clean

demo: $(READY)
	$(BIN)/python examples/demo.py

test: system lint types unit

# A first answer in two minutes: lint, types, doctests, and the packages whose tests start few processes.
QUICK := core capture costs data diagnostics distributed ensembles fuzz planning profiling storage vectorized \
	test_forbidden_calls.py test_layers.py test_readme.py
quick: lint types
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder $(addprefix tests/,$(QUICK)) src

lint: $(TOOLS)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(TOOLS)
	$(BIN)/mypy

# Files keep the order of tests/conftest.py: xdist would start those with few tests last, which are often the longest.
unit: $(TOOLS)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

bench: $(TOOLS)
	$(BIN)/python -m benchmarks.step
	$(BIN)/python -m benchmarks.feed
	$(BIN)/python -m pip install --quiet --constraint requirements/constraints.txt --editable '.[fuzz]'
	$(BIN)/python -m benchmarks.fuzz
	$(BIN)/python -m benchmarks.matrix --seed $$(date +%j)
	$(BIN)/python -m benchmarks.matrix --generated --seconds 180 --seed $$(date +%j)

# TensorFlow Serving's own client against our server, and a real Triton beside it; fetches TensorFlow and Triton (half a
# gigabyte each) the first time.
conformance: $(TOOLS)
	$(BIN)/python -m benchmarks.tensorflow_serving
	$(BIN)/python -m benchmarks.triton

docs: $(TOOLS)
	$(BIN)/python -m mkdocs build --strict --site-dir build/site

setup: $(TOOLS)

$(READY): pyproject.toml requirements/constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "manyhands needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint requirements/constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint requirements/constraints.txt --editable '.[demo]'
	touch $@

# What tests, lint and types need besides: the tools, and every optional package that is tested with.
$(TOOLS): $(READY)
	$(BIN)/python -m pip install --quiet --constraint requirements/constraints.txt --editable '.[dev]'
	touch $@

system:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		for package in $(DEBIAN); do dpkg -s $$package >/dev/null 2>&1 || missing="$$missing $$package"; done; \
		if [ -n "$$missing" ]; then apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $$missing; fi; \
	fi

clean:
	rm -rf $(VENV) .peers .peers-* build dist
