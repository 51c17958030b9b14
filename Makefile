# Everything runs inside $(VENV), which `make setup` fills with the versions of constraints.txt.
# VENV=folder and PYTHON=interpreter choose another environment and another Python (3.11 or newer).

VENV ?= .venv
PYTHON ?= python3

BIN := $(VENV)/bin
PARALLEL := --numprocesses logical --maxprocesses 4
SHARES := 16
EXTRAS := dev,hf,postgres,completion
DOCS_EXTRAS := $(EXTRAS),docs
# uv installs what pip installs in a fraction of the time, where it reaches the package index.
INSTALL = $(BIN)/python -m uv pip install --python $(BIN)/python --compile-bytecode -c constraints.txt -e $(1) \
	|| $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e $(1)

# Without kept bytecode, each of many processes would compile the same packages.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test nightly lint docs bench gpu-check clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1	\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: $(VENV)/.tested ## create the environment; runs again only after a change of pyproject.toml or constraints.txt

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "foldray needs Python 3.11 or newer; name one with PYTHON=…")'
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "Installing foldray and what it needs into $(VENV): about 2 GB the first time."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv
	@# First and pinned: a range may choose another build of several GB. uv would not read where pip is told to look for it.
	@$(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	@$(call INSTALL,.)
	@touch $@

$(VENV)/.tested: $(VENV)/.installed
	@$(call INSTALL,'.[$(EXTRAS)]')
	@touch $@

quickstart: $(VENV)/.installed ## train a small MoE model on two workers of this machine
	$(BIN)/python -m foldray train recipes/quickstart.yaml

test: setup ## run the tests that find most faults, in minutes; stops after ten failures
	$(BIN)/python -m pytest $(PARALLEL) --maxfail 10

nightly: setup ## run all tests, in sixteen shares; SHARE=I/16 runs one share
	@failed=0; for share in $(or $(SHARE),$$(seq -f '%g/$(SHARES)' 0 $$(($(SHARES) - 1)))); do \
		$(BIN)/python -m pytest $(PARALLEL) --share $$share || failed=1; \
	done; exit $$failed

lint: setup ## run ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy foldray trainers tuners benchmarks

$(VENV)/.documented: $(VENV)/.tested
	@$(call INSTALL,'.[$(DOCS_EXTRAS)]')
	@touch $@

docs: $(VENV)/.documented ## write the pages that the code knows, and make a site of all pages in docs/_build
	$(BIN)/python -m foldray.recipe.page > docs/recipe.md
	$(BIN)/python -m tests.error_lines > docs/troubleshooting.md
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build
	@echo "docs/_build/index.html is the first page"

bench: setup ## measure the MoE layer, and schedules over a slow link between two hosts (needs root)
	$(BIN)/python benchmarks/moe_layer.py
	$(BIN)/python benchmarks/overlap.py

gpu-check: ## check and measure the engine on a GPU, with the current Python; PARTS="correct block", OUT=FOLDER
	$(PYTHON) tests/gpu/check.py $(PARTS) $(if $(OUT),--out $(OUT))

clean: ## remove caches and build leftovers, but not the environment or runs/
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find foldray trainers tuners recipes tests -name __pycache__ -type d -prune -exec rm -rf {} +
