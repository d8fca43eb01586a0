# The two commands to know: `make demo` and `make test`. Both set up .venv by themselves.
VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed

# PYTHON=... overrides the search. Candidates are run, not only looked up: a shim may exist and not work.
OK     := import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,$(shell $(p) -c '$(OK)' 2>/dev/null && echo $(p))))

.PHONY: help venv demo vllm test lint clean
.DEFAULT_GOAL := help

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1	/p' $(MAKEFILE_LIST)

venv: $(STAMP) ## set up .venv from pyproject.toml and constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "outrider needs Python 3.11, 3.12 or 3.13 with venv: install one, or name it with PYTHON=..." >&2; exit 1; }
	@echo "setting up $(VENV) (several minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

demo: venv ## pull the default model and see it speculate
	@$(BIN)/outrider pull smollm2-135m
	@$(BIN)/outrider demo

vllm: ## set up .venv-vllm: vLLM for CPUs, and outrider with it
	@test -n "$(PYTHON)" || { echo "no usable Python was found: name one with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) scripts/vllm_env.py .venv-vllm

lint: venv ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Both environments are set up at once, each on a core of its own, and lint begins when the first is there.
# OUTRIDER_VLLM_PYTHON names a second that is there already.
test: ## lint, then every test that needs no GPU
	@$(MAKE) --no-print-directory --jobs 2 lint $(if $(OUTRIDER_VLLM_PYTHON),,vllm)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not gpu" -n auto --dist loadfile

clean: ## remove .venv, clients of others, caches and builds
	rm -rf $(VENV) .venv-clients build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
