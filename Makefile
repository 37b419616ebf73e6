# Quire's commands. `run`, `test`, `test-all`, `lint` and `types` need nothing before them: they make .venv and install into it what
# constraints.txt pins, once, and again when pyproject.toml or constraints.txt has changed.

PYTHON ?= python3
PORT ?= 8000
ARGS ?=
PYTEST_ARGS ?=
JOBS ?= 2
MINUTES ?= 10
SEED ?=

VENV := .venv
BIN := $(VENV)/bin
# A mark left by a finished installation: what a server needs, and what the tests need besides.
FOR_RUN := $(VENV)/.installed-run
FOR_TEST := $(VENV)/.installed-test
FOR_RAY := $(VENV)/.installed-test-ray
FOR_DEPLOY := $(VENV)/.installed-test-deploy
PIP_INSTALL = $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt
# One OpenMP thread: the tensors are tiny, and several wait for each other by spinning (on two busy cores the tests took five
# times as long). Bytecode is kept, whatever the environment says: hundreds of processes would each compile our modules anew.
# The files are shared out among JOBS processes, in the order of tests/conftest.py. A test that hangs shows its stacks and ends its
# process; a new process goes on with the tests behind it.
# What failed runs once more, alone: tests/run.py.
PYTEST = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python tests/run.py --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder \
	--max-worker-restart 4 -o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=true

.DEFAULT_GOAL := help
.PHONY: help run test test-all fuzz test-gpu test-browser test-ray test-deploy test-clients harmony-oracle lint types wheel clean
.DELETE_ON_ERROR:

help:
	@echo "make run       serve the bundled model at 127.0.0.1:$(PORT)   (PORT=8001, ARGS='MODEL --api-key KEY')"
	@echo "make test      run the tests but the slow ones            (PYTEST_ARGS='tests/ipc -x', JOBS=2 at a time)"
	@echo "make test-all  run all that needs no GPU and no browser"
	@echo "make fuzz      try hostile input for ten minutes     (MINUTES=60, SEED=7, ARGS='--target bodies', ARGS='--case FILE')"
	@echo "make test-gpu  run the GPU tests for ten minutes; called again, it goes on   (MINUTES=10, ARGS=--anew, PYTEST_ARGS=tests/gpu)"
	@echo "make test-browser  run the tests of the page in an installed Chromium"
	@echo "make test-ray  run the tests with a Ray cluster of this machine, for which Ray is installed"
	@echo "make test-deploy  check and run what is in deploy/ with HAProxy, nginx, promtool, systemd-analyze, which must be installed"
	@echo "make test-clients  run client packages and programs, from openai to Claude Code, against a server   (ARGS='openai codex', ARGS=--list)"
	@echo "make harmony-oracle  compare the kept readings of Harmony with openai-harmony, which is installed for it"
	@echo "make lint      check style and formatting with ruff"
	@echo "make types     check types with mypy"
	@echo "make wheel     build a wheel into dist/, for pip on other machines"
	@echo "make clean     remove .venv and caches"
	@echo "PYTHON=python3.12 chooses the interpreter that .venv is made with."

run: $(FOR_RUN)
	@exec $(BIN)/quire serve --port $(PORT) $(ARGS)

# The Triton interpreter is chosen when Triton is imported, so its tests have processes of their own; what PYTEST_ARGS names may
# have none of them, which is status 5. They share nothing in a file, so an idle process takes tests from the other. Both always run.
test: MARKS := not slow
test: INTERPRETED := interpret and not slow
test-all: MARKS :=
test-all: INTERPRETED := interpret
test test-all: $(FOR_TEST)
	@failed=0; \
	TRITON_INTERPRET=1 $(PYTEST) --dist worksteal -m '$(INTERPRETED)' $(or $(PYTEST_ARGS),tests/kernels) || [ $$? -eq 5 ] || failed=1; \
	$(PYTEST) -m '$(MARKS)' $(PYTEST_ARGS) || failed=1; \
	exit $$failed

# A minute of it, with cases that are the same in each run, is a part of the tests.
fuzz: $(FOR_TEST)
	@OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/run.py --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(ARGS)

# Its status says whether all have passed; what is left and what to do about it stands in its last lines.
test-gpu: $(FOR_TEST)
	@$(BIN)/python benchmarks/gpu_tests.py --minutes $(MINUTES) $(ARGS) $(PYTEST_ARGS)

test-browser: $(FOR_TEST)
	$(PYTEST) -m browser $(PYTEST_ARGS)

test-ray: $(FOR_RAY)
	$(PYTEST) -m ray tests/serving/test_ray.py

test-deploy: $(FOR_DEPLOY)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(PYTEST) -m deploy

# Downloads about 2 GB the first time, and keeps in build/clients what it has installed.
test-clients: $(FOR_TEST)
	@OMP_NUM_THREADS=1 $(BIN)/python tests/clients/programs/run_clients.py $(ARGS)
	@OMP_NUM_THREADS=1 $(BIN)/python tests/clients/programs/run_embedders.py

# The package's vocabulary comes from npm's registry (tests/support/harmony_oracle.py).
harmony-oracle: $(FOR_TEST)
	$(PIP_INSTALL) openai-harmony==0.0.8
	$(BIN)/python tests/support/harmony_oracle.py $(ARGS)

lint: $(FOR_TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(FOR_TEST)
	$(BIN)/mypy

# What an earlier build has left in build/ would be in this wheel, too.
wheel: $(FOR_RUN)
	@rm -rf build/lib build/bdist.*
	@$(BIN)/python -m pip --disable-pip-version-check wheel --quiet --no-deps --no-index --no-build-isolation --wheel-dir dist .
	@echo "Install it with: pip install '$$(ls -t "$(CURDIR)"/dist/quire-*.whl | head -n 1)'"

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(FOR_RUN): pyproject.toml constraints.txt
	$(call install,.)

$(FOR_TEST): pyproject.toml constraints.txt
	$(call install,.[test])
	@touch $(FOR_RUN)

$(FOR_RAY): pyproject.toml constraints.txt
	$(call install,.[test$(comma)ray])
	@touch $(FOR_RUN) $(FOR_TEST)

$(FOR_DEPLOY): pyproject.toml constraints.txt
	$(call install,.[test$(comma)test-deploy])
	@touch $(FOR_RUN) $(FOR_TEST)

comma := ,

# An environment whose pip does not start (half made, moved, its Python gone) is made anew. Without build isolation the
# package is built by the pinned setuptools, and nothing is downloaded for the build alone. Bytecode of packages is made by all cores:
# pip takes half of its time for it, on one. Some packages bring files for a newer Python, which compileall fails on and goes on.
define install
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { $(check_python) && $(PYTHON) -m venv --clear $(VENV); }
	@echo "Installing into $(VENV) (the first time takes a few minutes: PyTorch is large)"
	@$(PIP_INSTALL) setuptools
	@$(PIP_INSTALL) --no-build-isolation --editable '$(1)'
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@
endef

define check_python
{ command -v '$(PYTHON)' >/dev/null || { echo "Quire needs Python 3.11 or newer; there is no '$(PYTHON)' here. Use: make PYTHON=/path/to/python3" >&2; exit 1; }; } \
&& '$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
|| { echo "Quire needs Python 3.11 or newer; '$(PYTHON)' is $$('$(PYTHON)' -V 2>&1). Use: make PYTHON=/path/to/python3.11" >&2; exit 1; }
endef
