# Quire's commands. `run`, `test`, `test-all`, `lint` and `types` need nothing before them: they make .venv and install into it what
# constraints.txt pins, once, and again when pyproject.toml or constraints.txt has changed.

PYTHON ?= python3
PORT ?= 8000
ARGS ?=
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# A mark left by a finished installation: what a server needs, and what the tests need besides.
FOR_RUN := $(VENV)/.installed-run
FOR_TEST := $(VENV)/.installed-test
FOR_DEPLOY := $(VENV)/.installed-test-deploy
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# One OpenMP thread: the tensors are tiny, and several wait for each other by spinning (on two busy cores the tests took five
# times as long). A test that hangs shows its stacks and ends the run.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=true $(PYTEST_ARGS)

.DEFAULT_GOAL := help
.PHONY: help run test test-all test-browser test-deploy lint types clean
.DELETE_ON_ERROR:

help:
	@echo "make run       serve the bundled model at 127.0.0.1:$(PORT)   (PORT=8001, ARGS='MODEL --api-key KEY')"
	@echo "make test      run the tests but the slow ones            (PYTEST_ARGS='tests/ipc -x')"
	@echo "make test-all  run all that needs no GPU and no browser"
	@echo "make test-browser  run the tests of the page in an installed Chromium"
	@echo "make test-deploy  check and run what is in deploy/ with HAProxy, nginx, promtool, systemd-analyze, which must be installed"
	@echo "make lint      check style and formatting with ruff"
	@echo "make types     check types with mypy"
	@echo "make clean     remove .venv and caches"
	@echo "PYTHON=python3.12 chooses the interpreter that .venv is made with."

run: $(FOR_RUN)
	@exec $(BIN)/quire serve --port $(PORT) $(ARGS)

# The Triton interpreter is chosen when Triton is imported, so its tests have a process of their own. Both always run. `test-all`
# takes some twenty minutes on two idle cores, most of them spent waiting for processes.
test: MARKS := not slow
test-all: MARKS :=
test test-all: $(FOR_TEST)
	@failed=0; \
	TRITON_INTERPRET=1 $(PYTEST) -m interpret || failed=1; \
	$(PYTEST) -m '$(MARKS)' || failed=1; \
	exit $$failed

test-browser: $(FOR_TEST)
	$(PYTEST) -m browser

test-deploy: $(FOR_DEPLOY)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(PYTEST) -m deploy

lint: $(FOR_TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(FOR_TEST)
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(FOR_RUN): pyproject.toml constraints.txt
	$(call install,.)

$(FOR_TEST): pyproject.toml constraints.txt
	$(call install,.[test])
	@touch $(FOR_RUN)

$(FOR_DEPLOY): pyproject.toml constraints.txt
	$(call install,.[test$(comma)test-deploy])
	@touch $(FOR_RUN) $(FOR_TEST)

comma := ,

# An environment whose pip does not start (half made, moved, its Python gone) is made anew. Without build isolation the
# package is built by the pinned setuptools, and nothing is downloaded for the build alone.
define install
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { $(check_python) && $(PYTHON) -m venv --clear $(VENV); }
	@echo "Installing into $(VENV) (the first time takes a few minutes: PyTorch is large)"
	@$(PIP_INSTALL) setuptools
	@$(PIP_INSTALL) --no-build-isolation --editable '$(1)'
	@touch $@
endef

define check_python
{ command -v '$(PYTHON)' >/dev/null || { echo "Quire needs Python 3.11 or newer; there is no '$(PYTHON)' here. Use: make PYTHON=/path/to/python3" >&2; exit 1; }; } \
&& '$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
|| { echo "Quire needs Python 3.11 or newer; '$(PYTHON)' is $$('$(PYTHON)' -V 2>&1). Use: make PYTHON=/path/to/python3.11" >&2; exit 1; }
endef
