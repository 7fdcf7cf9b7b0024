# A few words run the project: demo, test, e2e, check, bench. Each does its own set-up in .venv.
PYTHON ?= python3
BIN    := .venv/bin
READY  := .venv/.ready
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest # workers and the programs they start share bytecode

.DEFAULT_GOAL := help
.PHONY: help demo test coverage e2e e2e-full chaos fuzz check format bench bench-scheduler bench-hostile bench-scrape bench-packing pictures lock clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): requirements.lock pyproject.toml
	@echo "Setting up .venv (once, about half a minute) ..."
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: $(READY) ## The main job on an embedded in-memory cluster; ends by itself
	@$(BIN)/gputile demo

test: $(READY) ## Unit tests, one process more than cores: no network
	$(PYTEST) --numprocesses auto --dist worksteal

coverage: $(READY) ## Unit tests once more, with the share of lines that they run
	$(PYTEST) --numprocesses auto --dist worksteal --cov gputile --cov-report term:skip-covered

e2e: $(READY) ## The same on a real API server and kube-scheduler (builds Kubernetes once; needs Go)
	$(BIN)/python -m pytest tests/e2e -rs

e2e-full: e2e ## What does not fit into a landing, too: chaos, fuzz and hostile pods (some two hours)
	$(MAKE) chaos MINUTES=$(or $(MINUTES),30)
	$(MAKE) fuzz
	$(MAKE) bench-hostile

chaos: $(READY) ## Storms of pods while things break, on the real thing: SEED=7 to replay, MINUTES=30 to go on
	$(BIN)/python -m tests.e2e.chaos $(if $(SEED),--seed $(SEED)) $(if $(MINUTES),--minutes $(MINUTES))

fuzz: $(READY) ## Mangled input to the verbs, the metrics API, the agent's port, kubelet messages and YAML (ARGS="--help")
	$(BIN)/python -m bench.fuzz $(ARGS)

check: $(READY) ## Format, lint, types, import directions
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY) ## Let ruff rewrite the files
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY) ## Speed of the engine, how soon commands start, memory of the agent, against baselines of the same run
	$(BIN)/python -m bench.engine
	$(BIN)/python -m bench.start
	$(BIN)/python -m bench.agent

bench-scheduler: $(READY) ## Pods per second with and without gputile on a real kube-scheduler (ARGS="--help")
	$(BIN)/python -m bench.scheduler $(ARGS)

bench-hostile: $(READY) ## /healthz and verbs of good pods beside hostile pods and slow clients, real API server (ARGS="--help")
	$(BIN)/python -m bench.hostile $(ARGS)

bench-scrape: $(READY) ## How long a scrape of the scheduler's /metrics takes, and what it holds up
	$(BIN)/python -m bench.scrape

bench-packing: $(READY) ## The openb list through a real kube-scheduler: LIST=<folder of the lists>
	$(BIN)/python -m bench.packing $(if $(LIST),$(LIST),--help) $(ARGS)

pictures: $(READY) ## Draw the pictures of docs/: architecture, packing, terminal
	$(BIN)/python -m bench.architecture
	$(BIN)/python -m bench.pictures
	$(BIN)/python -m bench.terminal

lock: ## Pin the dependencies anew (needs uv)
	uv pip compile pyproject.toml --extra dev --generate-hashes \
	  --python-version 3.11 --universal --custom-compile-command "make lock" -o requirements.lock

clean: ## Remove what the other targets made
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
