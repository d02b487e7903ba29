# `make demo` and `make test` need git, make, gcc and Python >= 3.10 with its headers, nothing else.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two files of tests at a time: much of a test is waiting. PARALLEL= runs them one by one.
PARALLEL := -n 2 --dist loadfile
# The build backend looks for meson, ninja and cython on the path.
PIP := PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip --disable-pip-version-check
SOURCES := $(shell find tablespace -name '*.py' -o -name '*.pyx' -o -name '*.pxd' -o -name '*.pyi' \
	-o -name '*.h' -o -name 'meson.build' -o -name 'pyproject.toml' | grep -v /build/)

.PHONY: demo test test-long sanitize engines coverage lint bench dev clean

demo: $(VENV)/.installed
	$(BIN)/python -m kvd demo

test: $(VENV)/.installed
	$(BIN)/python -m pytest $(PARALLEL) -m "not long"

test-long: $(VENV)/.installed
	$(BIN)/python -m pytest $(PARALLEL) -m long

sanitize: $(VENV)/.installed
	$(BIN)/python -m pytest -m long tests/sanitizers

# Real engines for tests/connectors/engines, each in an environment of its own: 2.5 GB and minutes each.
engines: $(VENV)/.installed
	$(BIN)/python tools/engine_venv.py vllm sglang
	$(BIN)/python -m pytest -m long tests/connectors/engines

coverage: $(VENV)/.installed
	$(BIN)/python tools/line_coverage.py

lint: $(VENV)/.installed
	$(BIN)/python -m pytest tests/test_lint.py tests/test_tidy.py tests/test_layers.py

bench: $(VENV)/.installed
	$(BIN)/python asv_bench/quick.py

# Editable installs of both distributions: a touched .pyx is rebuilt at the next import.
dev: $(VENV)/.tools
	$(PIP) install --quiet --no-deps --editable .
	$(PIP) install --quiet --no-build-isolation --no-deps --editable ./tablespace
	@touch $(VENV)/.installed

$(VENV)/.installed: $(VENV)/.tools $(SOURCES)
	$(PIP) install --quiet --no-build-isolation --no-deps --force-reinstall \
		--config-settings=build-dir="$(CURDIR)/$(VENV)/build" ./tablespace
	$(PIP) install --quiet --no-build-isolation --no-deps --editable .
	@touch $@

$(VENV)/.tools: pyproject.toml setup.py tablespace/pyproject.toml requirements-dev.txt
	@$(PYTHON) tools/preflight.py
	@echo "setting up $(VENV): what requirements-dev.txt names, then both packages; some 2 minutes"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --requirement requirements-dev.txt
	@touch $@

clean:
	rm -rf $(VENV) .venv-asan .venv-tsan .venv-coverage build dist tablespace/build tablespace/dist *.egg-info
