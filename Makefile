# Everything a contributor or an operator does here, one target each. Variables can be given on the command line.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

# Knobs of run-cluster; those left empty take `rankway up`'s own defaults.
WORKERS ?=
RANKS_PER_WORKER ?=
ENGINE ?=
MODEL ?=
BLOCK_SIZE ?=
HTTP_PORT ?=
GRPC_PORT ?=
LOG_LEVEL ?=
# More options of `rankway up`, e.g. ARGS='--log-format json'.
ARGS ?=

# What the installed package is built from: when one of these is newer than the stamp, it is installed again.
BUILT_FROM := pyproject.toml $(wildcard setup.py src/rankway/_core*.c src/rankway/_core*.h src/rankway/_core*.pyx)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help dev protos lint test test-vllm bench bench-proxy bench-vllm soak run-cluster demo-model clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.installed: $(BUILT_FROM)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --editable '.[local]'
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --group dev
	@touch $@

dev: $(VENV)/.dev ## make .venv with everything that development needs

run-cluster: $(VENV)/.installed ## a whole cluster on this machine, in the foreground; Ctrl-C ends it
	@exec $(BIN)/rankway up $(if $(WORKERS),--workers=$(WORKERS)) $(if $(RANKS_PER_WORKER),--ranks-per-worker=$(RANKS_PER_WORKER)) \
	  $(if $(ENGINE),--engine=$(ENGINE)) $(if $(MODEL),--model='$(MODEL)') $(if $(BLOCK_SIZE),--block-size=$(BLOCK_SIZE)) \
	  $(if $(HTTP_PORT),--http-port=$(HTTP_PORT)) $(if $(GRPC_PORT),--grpc-port=$(GRPC_PORT)) \
	  $(if $(LOG_LEVEL),--log-level=$(LOG_LEVEL)) $(ARGS)

test: $(VENV)/.dev ## the default tests
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.dev ## ruff, mypy (strict), import rules, generated code up to date
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) --no-print-directory protos
	git diff --exit-code -- src/rankway/v1

protos: $(VENV)/.dev ## generate src/rankway/v1 from protos/
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=src --grpc_python_out=src \
	  --mypy_out=quiet:src --mypy_grpc_out=quiet:src protos/rankway/v1/*.proto

clean: ## remove the virtual environment, caches and builds
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
