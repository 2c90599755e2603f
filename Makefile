# Each target installs what it needs; the only requirements are git, make and Python 3.10 or newer with venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Test processes: two more than CPU cores, because two of them mostly wait for a SLURM cluster and for whole jobs.
PROCESSES ?= $(shell expr $$(nproc 2>/dev/null || echo 2) + 2)
SEED ?= 0
LIGHT_TESTS := tests/cli tests/models tests/show tests/spec
comma := ,
# Parts of `make proof` that kill trainings on a SLURM cluster at random times or simulate single faults of a cluster.
CHAOS := soak-16-nodes-1 chaos killed-at-calls cached-attributes full-disk recovery links growing-chain soak-1-to-4-nodes-1

.PHONY: help quickstart test test-light test-slurm proof golden chaos gpu slurm-packages browser-packages debian-packages check collected format lint types contracts docs install clean
.DEFAULT_GOAL := help

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 18

install: $(VENV)/.installed ## create .venv with tula and its development dependencies

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@ $(VENV)/.trainable

$(VENV)/.trainable: pyproject.toml
	@echo "This downloads 3.1 GB: torch with its CUDA libraries. PyTorch's builds for CPUs are much smaller;"
	@echo "its installation page names their package index: PIP_EXTRA_INDEX_URL=INDEX make quickstart"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable '.[torch,report]'
	touch $@

quickstart: $(VENV)/.trainable ## profile, recommend and train a small job on this machine (a few minutes), and write quickstart.html
	$(BIN)/tula check configs/quickstart.yaml
	$(BIN)/tula profile configs/quickstart.yaml --yes
	$(BIN)/tula recommend
	$(BIN)/tula train --yes
	$(BIN)/tula report --html quickstart.html

test: install ## run all tests except those of `make proof`
	$(BIN)/python -m compileall -q tula_cli # hundreds of processes import it, also if PYTHONDONTWRITEBYTECODE is set
	$(BIN)/python -m pytest -n $(PROCESSES)

test-light: ## run the tests that need no torch, root or cluster, in an environment without torch (.venv-light)
	$(PYTHON) -m venv .venv-light
	.venv-light/bin/pip install --quiet --editable '.[tests]'
	.venv-light/bin/python -m pytest -n auto -m "not e2e and not torch and not slurm and not proof" $(LIGHT_TESTS)

proof: install slurm-packages ## run the long tests in parts, skipping parts that passed on the same code (SEED=0, BUDGET=3m, PARTS=; Debian, root)
	$(BIN)/python tests/proof.py --seed $(SEED) $(if $(BUDGET),--budget $(BUDGET)) $(PARTS)

golden: install ## update the expected outputs of the golden tests, and show the differences (CASES=recommend,train-method-ags)
	$(BIN)/python tests/golden/renew.py $(subst $(comma), ,$(CASES))

chaos: install slurm-packages ## kill trainings on a SLURM cluster at random times, and compare them with uninterrupted ones (SEED=0)
	TULA_REQUIRE_SLURM=1 $(BIN)/python tests/proof.py --seed $(SEED) $(CHAOS)

gpu: install ## run the measurements that need a GPU, skipping finished stages (STAGES=env,oom BUDGET=540 OUT=build/gpu)
	$(BIN)/python -u benchmarks/on_gpu.py --out $(or $(OUT),build/gpu) $(if $(STAGES),--stages $(STAGES)) \
		$(if $(BUDGET),--budget $(BUDGET)) $(if $(DATA),--data $(DATA))

slurm-packages: ## install the Debian packages for the tests on a real SLURM cluster (Debian, root)
	$(PYTHON) tests/slurm/cluster.py install

browser-packages: ## install the browser for the tests of HTML pages (Debian, root)
	$(PYTHON) tests/helpers/browser.py install

debian-packages: ## install both, one after the other because of the lock of Debian's package manager
	$(MAKE) slurm-packages
	$(MAKE) browser-packages

test-slurm: install slurm-packages ## run the tests on a real SLURM cluster of 4 nodes on this machine (Debian, root)
	TULA_REQUIRE_SLURM=1 $(BIN)/python -m pytest -n 2 tests/slurm

format: install ## format all files
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: install
	$(BIN)/mypy

contracts: install
	$(BIN)/lint-imports

check: install ## what CI runs: format, lint, types, import contracts, tests
	$(MAKE) --jobs=2 --output-sync types lint contracts collected
	$(MAKE) test

collected: install # writes the bytecode of the test modules for all processes of pytest, while mypy uses the other core
	$(BIN)/python -m pytest --collect-only --quiet --quiet > /dev/null

docs: install ## build the pages of docs/ into build/docs; a warning is an error
	$(BIN)/pip install --quiet --editable '.[docs]'
	$(BIN)/python docs/reference.py
	$(BIN)/python docs/results.py
	$(BIN)/python docs/sessions.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean: ## remove all files made by make and the tools, except runs
	rm -rf $(VENV) .venv-light build dist .proof .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
