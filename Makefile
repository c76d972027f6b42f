# On a fresh machine with Python 3.11 or newer, `make train` and `make test` are all there is to type.
VENV := .venv
PEERS_VENV := .venv-conformance
NEWEST_VENV := .venv-newest
DOCS_VENV := .venv-docs
AUDIT_VENV := .venv-audit
HARNESSES := .venv-harnesses
SITE := site
PYTHON ?= python3
# The newest Megatron needs another one than `python3` may be.
NEWEST_PYTHON := $(if $(filter file,$(origin PYTHON)),$(firstword $(wildcard $(HOME)/.pyenv/versions/3.12.*/bin/python3.12) \
	python3.12),$(PYTHON))
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
ALGO ?= grpo
MODEL ?= tiny
TASK ?= $(if $(filter smollm2,$(MODEL)),arithmetic,sums)
SEED ?= 0
# The rank of adapters to train in place of the weights; empty: the weights.
LORA ?=
# Which wide tests run too: 1 is all, 3/8 those of each eighth file.
WIDE ?=

.DEFAULT_GOAL := help
.PHONY: help python install train test test-lab test-slurm test-long test-gpu test-newest test-conformance test-harnesses check audit docs clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-16s %s\n", $$1, $$2}' Makefile
	@echo "Settings: MODEL=$(MODEL) ALGO=$(ALGO) TASK=$(TASK) SEED=$(SEED) LORA=$(LORA) PYTHON=$(PYTHON) TORCH_CPU_INDEX=$(TORCH_CPU_INDEX)"
	@echo "PYTHON makes a new $(VENV); to change the Python of an old one, remove $(VENV) first."

python:
	@command -v "$(PYTHON)" >/dev/null || { echo "install: no $(PYTHON); install Python 3.11 or newer (Debian:" \
		"apt-get install python3 python3-venv) or name one: make install PYTHON=python3.11" >&2; exit 1; }

install: python ## Make .venv and install all of it for CPU; does nothing if that is done
	@"$(PYTHON)" tools/install.py --venv "$(VENV)" --torch-index "$(TORCH_CPU_INDEX)"

train: install ## Train a small model: make train ALGO=grpo TASK=sums SEED=0, or MODEL=smollm2, or LORA=32
	"$(VENV)/bin/megarl" quickstart --model $(MODEL) --algo $(ALGO) --task $(TASK) --seed $(SEED) $(if $(LORA),--lora $(LORA))

# Tests run in forks of one process, which has imported what they need (tests/helpers/forks.py). Unit tests wait half of
# the time, so three times as many files as there are cores run at once, in their order, as the first folders wait the
# most. Tests of several ranks leave half a core idle, and whole runs do while they start. Many start processes, which
# need not compile the package each. Whole runs are apart from unit tests, whose Ray may still live in the worker.
test test-lab test-slurm: export PYTHONDONTWRITEBYTECODE =
test: install ## Run the tests; with WIDE=1 also those that take seconds each (further layouts, models, whole runs), or 1/8 of them
	"$(VENV)/bin/python" -m pytest tests/unit -m "not long and not gpu" --wide "$(WIDE)" --forks 6
	"$(VENV)/bin/python" -m pytest tests/e2e tests/distributed -m "not long and not gpu" --wide "$(WIDE)" --forks 3

test-lab: install ## Run the tests of benches, studies, recipes and forecasts of schedules
	"$(VENV)/bin/python" -m pytest tests/lab -m "not long and not gpu" --forks 2

test-slurm: install ## Run the tests on a real Slurm of two nodes; needs root, installs Debian's Slurm
	"$(VENV)/bin/python" -m pytest tests/slurm -m "not long"

test-long: install ## Run further combinations of layouts, algorithms and processes
	"$(VENV)/bin/python" -m pytest tests -m long

test-gpu: ## Run the tests that need a CUDA device: make test-gpu VENV=DIR, made by containers/install.sh DIR
	@test -x "$(VENV)/bin/python" || { echo "test-gpu: no $(VENV)/bin/python; make an environment with" \
		"containers/install.sh DIR, and name it: make test-gpu VENV=DIR" >&2; exit 1; }
	"$(VENV)/bin/python" -m pytest tests/gpu

# The kernels of the log-prob head do without Megatron, and their tests want Triton on no import path.
NEWEST_OMITS := tests/unit/parallel/test_triton_kernels.py
test-newest: ## Run the trainer's tests on the newest Megatron that megarl is tested with, and Python 3.12
	@"$(NEWEST_PYTHON)" --version >/dev/null 2>&1 || { echo "test-newest: no $(NEWEST_PYTHON); name a Python 3.12 or" \
		"newer: make test-newest PYTHON=FILE" >&2; exit 1; }
	@"$(NEWEST_PYTHON)" tools/install.py --kind newest --venv "$(NEWEST_VENV)" --torch-index "$(TORCH_CPU_INDEX)"
	@echo "left out: $(NEWEST_OMITS), whose kernels do without Megatron; tests/e2e and tests/slurm, whose runs need vLLM;" \
		"other folders of tests/unit, which do not import Megatron; long tests"
	"$(NEWEST_VENV)/bin/python" -m pytest tests/unit/parallel tests/unit/weights tests/unit/convert tests/distributed \
		$(addprefix --ignore=,$(NEWEST_OMITS)) -m "not long and not gpu" --forks 2

test-conformance: python ## Compare formulas with verl, OpenRLHF and TRL, installed into .venv-conformance
	@"$(PYTHON)" tools/install.py --kind peers --venv "$(PEERS_VENV)" --torch-index "$(TORCH_CPU_INDEX)"
	"$(PEERS_VENV)/bin/python" -m pytest tests/conformance --confcutdir=tests/conformance

test-harnesses: install ## Train with real agents, Claude Code and Codex from npm; needs npm and bubblewrap
	npm install --prefix "$(HARNESSES)" --no-audit --no-fund @anthropic-ai/claude-code@2.1.197 @openai/codex@0.171.0
	node "$(HARNESSES)/node_modules/@anthropic-ai/claude-code/install.cjs"
	PATH="$(abspath $(HARNESSES))/node_modules/.bin:$$PATH" "$(VENV)/bin/python" -m pytest tests/harnesses

check: install ## Lint, format check, types, shell scripts, containers, import rules
	"$(VENV)/bin/ruff" check .
	"$(VENV)/bin/ruff" format --check .
	"$(VENV)/bin/mypy" megarl megarl_answers megarl_lab megarl_sandbox tools
	"$(VENV)/bin/shellcheck" .ci/run slurm/*.sh slurm/*.sbatch containers/*.sh
	"$(VENV)/bin/shellcheck" --external-sources tests/gpu/*.sh
	"$(VENV)/bin/hadolint" containers/Dockerfile
	"$(VENV)/bin/python" -m pytest tests/unit/test_import_rules.py

# Of packages from an index only: sources of a commit have no release that an advisory could name, and advisories know
# torch's CPU build by its public version. A package that could not be looked up is an error.
audit: $(AUDIT_VENV)/audit.txt ## Look up known vulnerabilities of all packages in requirements/
	@for file in requirements/*.txt; do echo "$$file"; sed '/ @ git+/d; s/+cpu$$//' "$$file" >"$(AUDIT_VENV)/list.txt"; \
		"$(AUDIT_VENV)/bin/pip-audit" --strict --no-deps --disable-pip -r "$(AUDIT_VENV)/list.txt" || failed=1; \
	done; exit "$${failed:-0}"

docs: $(DOCS_VENV)/docs.txt ## Make a site of the documentation, with search: site/index.html
	"$(DOCS_VENV)/bin/mkdocs" build --strict --quiet --site-dir "$(abspath $(SITE))"

# Copied when all of it is installed.
$(DOCS_VENV)/docs.txt: requirements/docs.txt | python
	"$(PYTHON)" -m venv "$(DOCS_VENV)"
	"$(DOCS_VENV)/bin/python" -m pip install --quiet --no-deps --only-binary :all: -r requirements/docs.txt
	cp requirements/docs.txt "$@"

$(AUDIT_VENV)/audit.txt: requirements/audit.txt | python
	"$(PYTHON)" -m venv "$(AUDIT_VENV)"
	"$(AUDIT_VENV)/bin/python" -m pip install --quiet --no-deps --only-binary :all: -r requirements/audit.txt
	cp requirements/audit.txt "$@"

clean: ## Remove caches, nothing else
	find . \( -path "./$(VENV)" -o -path "./$(PEERS_VENV)" -o -path "./$(NEWEST_VENV)" -o -path "./$(DOCS_VENV)" -o -path "./$(AUDIT_VENV)" -o -path "./$(HARNESSES)" -o -path ./.git \) -prune -o -type d \( -name __pycache__ \
		-o -name .pytest_cache -o -name .mypy_cache -o -name .ruff_cache -o -name .hypothesis \) -prune -exec rm -rf {} +
