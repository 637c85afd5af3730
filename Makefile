# Every target works from a fresh clone: those that need the tools depend on `setup`, which makes .venv once.
PYTHON ?= python3
WORKERS ?= 2
PEERS ?= benchmarks/peers/.environments
# Where torch comes from: its own index has the CPU build for every system. For a GPU: TORCH_INDEX=https://pypi.org/simple
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
BIN := .venv/bin
RUNS := .venv/.runs
INSTALLED := .venv/.installed
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint format reference results leaderboard docs bench wheel clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(INSTALLED) ## make .venv with the package and its tools (again only when a version changes)

# What running needs: the package and its dependencies, without the tools of developers. A torch that is there stays.
$(RUNS): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "dqnfed needs Python 3.11 or later, but $(PYTHON) is older; try: make setup PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing dqnfed and what it runs on into .venv: about 1.3 GB, a few minutes"
	$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) --no-deps --retries 1 --index-url $(TORCH_INDEX) torch || \
	  echo "$(TORCH_INDEX) gave no torch; pip's own index is asked, whose build for Linux holds gigabytes of GPU libraries"
	$(PIP) -e .
	@touch $@

$(INSTALLED): $(RUNS)
	@echo "installing every extra and the tools of developers into .venv: about 2 GB more, several minutes"
	$(PIP) -e '.[dev]'
	@touch $@

demo: $(RUNS) ## compare DQN-Fed with FedAvg and two more on digits: table and runs/demo/report.html
	$(BIN)/dqnfed compare digits --out runs/demo

# One BLAS thread a worker: more would only make the workers wait for each other.
test test-all: export OMP_NUM_THREADS := 1

test: lint ## what CI runs: lint, types and every test that is not slow
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow"

test-all: lint ## everything, the slow and exhaustive tests too
	$(BIN)/python -m pytest -n $(WORKERS)

lint: setup ## ruff (rules and format) and mypy --strict over src and tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: setup ## rewrite the sources in the house format
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

reference: setup ## write the pages about methods and borders from the sources
	$(BIN)/python -m dqnfed.experiments.method_docs
	$(BIN)/python -m dqnfed.experiments.border_docs
	$(BIN)/python -m dqnfed.experiments.reply_docs

# Alone it lists every setting and whether it is measured. TABLE=digits rebuilds a page from its stored summary; RUN=1 first
# runs its commands (docs/results/tables.toml, tuned.toml), for which a GPU helps; what was interrupted goes on where it was.
# SECONDS and DEVICE are for tables whose methods are tuned alike.
results: setup ## list what is measured, or rebuild a page: make results TABLE=digits [RUN=1 JOBS=8 SEEDS=0:5 HARDWARE="..."]
	$(BIN)/python -m dqnfed.report.results $(TABLE) \
	  $(if $(RUN),--run $(if $(HARDWARE),--hardware "$(HARDWARE)") $(if $(SEEDS),--seeds $(SEEDS)) \
	    $(if $(JOBS),--jobs $(JOBS)) $(if $(SECONDS),--seconds $(SECONDS)) $(if $(DEVICE),--device $(DEVICE)))

# Every network method on three small problems, tuned alike: about an hour of two cores. It can be cut short (SECONDS) and
# goes on where it was. METHODS=mine adds one that an entry point registers to the stored runs of the others. On a GPU:
# DEVICE=cuda METHODS=best:10 PROBLEMS=mnist-by-writer,cifar10-mlp.
leaderboard: STORED := $(if $(METHODS),$(wildcard docs/results/data/leaderboard.json))
leaderboard: setup ## measure every method and rebuild docs/results/leaderboard.md: make leaderboard [JOBS=8 SECONDS=3600 METHODS=...]
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/leaderboard.py --out runs/leaderboard.jsonl --jobs $(or $(JOBS),2) \
	  $(if $(SECONDS),--seconds $(SECONDS)) $(if $(METHODS),--methods $(METHODS)) $(if $(PROBLEMS),--problems $(PROBLEMS)) \
	  $(if $(DEVICE),--device $(DEVICE)) $(if $(STORED),--stored $(STORED))
	$(BIN)/python -m dqnfed.report.results leaderboard --hardware "$(or $(HARDWARE),not stated)" \
	  --from $(STORED) runs/leaderboard.jsonl

docs: setup ## build the documentation into site/
	$(PIP) --quiet -e '.[docs]'
	$(BIN)/mkdocs build --strict

bench: setup ## time rounds next to other frameworks' and how they grow; prints tables, writes docs/results/speed.md
	PYTHON=$(BIN)/python benchmarks/peers/install.sh $(PEERS)
	$(BIN)/python benchmarks/side_by_side.py --environments $(PEERS) --json benchmarks/results/side_by_side.json
	$(BIN)/python benchmarks/scaling.py --json benchmarks/results/scaling.json
	$(BIN)/python benchmarks/server_step.py --clients 100 --json benchmarks/results/server_step.json
	$(BIN)/python benchmarks/page.py

wheel: setup ## build dist/dqnfed-*.whl
	$(BIN)/python -m build --wheel --no-isolation

clean: ## remove build products and caches; .venv and runs/ stay
	rm -rf build dist site .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
