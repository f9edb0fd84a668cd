# Octavo: `make demo` answers a prompt, `make test` checks everything. `make help` lists the rest.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

VENV ?= .venv
BIN := $(VENV)/bin
# The first interpreter that starts and has a supported version.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	$$p -c 'import sys; sys.exit(not ((3, 11) <= sys.version_info[:2] < (3, 14)))' 2>/dev/null && { echo $$p; break; }; done)
PIP := $(BIN)/python -m pip --disable-pip-version-check
PIP_ARGS ?=
PROMPT ?= Why does bread dough rise in a warm kitchen?
export OCTAVO_PEERS_DIR ?= $(HOME)/.cache/octavo/peers

NATIVE_SOURCES := $(shell find native -type f 2>/dev/null)
SETUP_STAMP := $(VENV)/.octavo-setup
TEST_STAMP := $(VENV)/.octavo-test
NATIVE_STAMP := $(VENV)/.octavo-native

.PHONY: help setup setup-test demo test check soak mutate wheel peers figures docs test-cuda clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 24

$(BIN)/python:
	@if [ -z "$(PYTHON)" ]; then echo "octavo: needs Python 3.11, 3.12 or 3.13 on the PATH (Debian: apt-get install python3 python3-venv)" >&2; exit 1; fi
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
		echo "octavo: $(PYTHON) has no venv module (Debian: apt-get install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(SETUP_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install $(PIP_ARGS) --quiet -c constraints.txt -e '.[all]'
	@touch $@

$(TEST_STAMP): $(SETUP_STAMP) requirements-reference.txt
	$(PIP) install $(PIP_ARGS) --quiet --no-warn-conflicts -c constraints.txt -e '.[test]'
	$(PIP) install $(PIP_ARGS) --quiet --no-deps --no-warn-conflicts -r requirements-reference.txt
	@touch $@

# Without a C++ compiler this says so and goes on: the torch operations serve instead.
$(NATIVE_STAMP): $(SETUP_STAMP) CMakeLists.txt scripts/build_native.sh $(NATIVE_SOURCES)
	@if [ "$${OCTAVO_NATIVE:-1}" = 0 ] || ! command -v c++ >/dev/null; then \
		echo "octavo: no C++ compiler (or OCTAVO_NATIVE=0): running on the torch operations"; \
	else \
		export PATH="$(abspath $(BIN)):$$PATH"; \
		for tool in cmake ninja; do command -v $$tool >/dev/null || $(PIP) install $(PIP_ARGS) --quiet -c constraints.txt $$tool; done; \
		bash scripts/build_native.sh || { echo "octavo: the native build failed; OCTAVO_NATIVE=0 make setup does without" >&2; exit 1; }; \
	fi
	@touch $@

setup: $(SETUP_STAMP) $(NATIVE_STAMP) ## make .venv with octavo in it (and the native operations where a compiler is)

setup-test: setup $(TEST_STAMP)

demo: setup ## fetch SmolLM2 once and answer a prompt: make demo PROMPT="…"
	@$(BIN)/octavo generate --model smollm2 "$(PROMPT)"

test: setup-test ## everything but the soak: laws, units, engine, API, real models, checks
	@bash scripts/test.sh

check: setup-test ## form, types, licences, generated documents and figures in step
	@bash scripts/check.sh

docs: setup-test ## rewrite the generated documents
	$(BIN)/python scripts/generate_docs.py

soak: setup-test ## what is too long for `make test`
	@bash scripts/soak.sh

mutate: setup-test ## mutation sweep over kv/
	$(BIN)/python scripts/mutate.py

wheel: setup-test ## build sdist and wheel, install the wheel without a compiler, answer a prompt with it
	@bash scripts/wheel.sh

peers: ## build the peers' environments for `octavo bench --peer` in $OCTAVO_PEERS_DIR
	@bash scripts/peers.sh

figures: setup ## rewrite the README's table from benchmarks/results
	$(BIN)/python scripts/figures.py

test-cuda: setup-test ## at most 8 minutes, on a machine with a CUDA device
	@bash scripts/test_cuda.sh

clean: ## remove the environment and everything that was built
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis test-artifacts
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
	find src \( -name '*.so' -o -name '*.egg-info' \) -prune -exec rm -rf {} +
