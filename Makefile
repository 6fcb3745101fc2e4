# The first command makes the environment that all run in: it needs Python 3.11 or newer, and an index.
#   make test PYTHON=python3.13 VENV=.venv313     another Python, another folder
#   make test ARGS='-k adam'                      arguments for the command behind the target

VENV ?= .venv
PYTHONS ?= 3.12 3.13 3.11 3
TORCH_SPEC ?= torch>=2.6
JOBS ?= 2
CENSUS := tests/data/census.json
ARGS ?=

# megatron-core has wheels for Linux alone, where torch comes in its CUDA build: 3 GB, and it runs
# on a CPU too.
EXTRAS ?= $(if $(filter Linux,$(shell uname -s)),megatron$(comma))trainers,ecosystem,demo,test,lint,docs
comma := ,

# The first Python that is new enough: the environment's, else each of PYTHONS on the PATH and under
# pyenv. Each is run, not only found: pyenv has shims that name no Python, and Debian's may lack venv.
version := import ensurepip, platform, sys; sys.version_info < (3, 11) or print(platform.python_version())
find_python = try() { \
    if [ -x "$$1" ] && [ -n "$$("$$1" -c '$(version)' 2>/dev/null)" ]; then echo "$$1"; exit; fi; }; \
  try "$(VENV)/bin/python"; \
  for version in $(PYTHONS); do \
    IFS=:; for folder in $$PATH; do try "$$folder/python$$version"; done; unset IFS; \
    for python in "$${PYENV_ROOT:-$$HOME/.pyenv}/versions/$$version"*/bin/python; do try "$$python"; done; \
  done

ifndef PYTHON
PYTHON := $(shell $(find_python))
endif
VERSION := $(if $(PYTHON),$(shell "$(PYTHON)" -c '$(version)' 2>/dev/null))

MADE := $(VENV)/.made-with-python-$(VERSION)
READY := $(VENV)/.installed
RUN := "$(VENV)/bin/python" -m

.PHONY: help demo test test-gpu bench draft-measure lint docs wheel python clean

help:  ## Print the targets (the default).
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' Makefile

demo: $(READY)  ## Reset a small real model's optimizer, and prove it.
	"$(VENV)/bin/miles-reset" demo $(ARGS)

test: $(READY)  ## Run the tests.
	$(RUN) pytest -n $(JOBS) $(ARGS)

test-gpu: $(READY)  ## Run the tests that need a CUDA device.
	$(RUN) pytest -m gpu $(ARGS)

bench: $(READY)  ## Measure the speed against the plain loop.
	$(RUN) pytest tests/benchmarks $(ARGS)

census: $(READY)  ## Hold all variants of all optimizers to the law, and write what was found.
	$(RUN) pytest -n $(JOBS) tests/plugins -k is_fresh --census=$(CENSUS) $(ARGS)
	"$(VENV)/bin/python" tests/census.py page $(CENSUS) > docs/supported-optimizers.md

drift:  ## Take the census with the newest release of each package, and name what changed.
	rm -rf .venv-drift
	$(MAKE) .venv-drift/.installed VENV=.venv-drift
	-.venv-drift/bin/python -m pytest -n $(JOBS) tests/plugins -k is_fresh --census=.venv-drift/census.json $(ARGS)
	.venv-drift/bin/python tests/census.py compare $(CENSUS) .venv-drift/census.json

draft-measure: $(READY)  ## Count for how many optimizers of the tests a draft passes the law.
	$(RUN) pytest -n 0 -q tests/measures/drafting.py $(ARGS)

lint: $(READY)  ## Check style, format and types.
	$(RUN) ruff check
	$(RUN) ruff format --check
	$(RUN) mypy

docs: $(READY)  ## Build the documentation into site/.
	$(RUN) mkdocs build --strict $(ARGS)

wheel: $(READY)  ## Build the wheel and the source distribution into dist/.
	$(RUN) build $(ARGS)

python:  ## Print the Python that is used.
	@test -n "$(VERSION)" && echo "$(PYTHON)"

clean:  ## Remove what was built, but not the environment.
	rm -rf build dist site *.egg-info .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find miles_reset plugins tests -name __pycache__ -prune -exec rm -rf {} +

# Another Python gets a fresh environment; one that is there and runs is taken as it is, whoever made it.
$(MADE):
	@test -n "$(VERSION)" || { echo "$(if $(PYTHON),$(PYTHON) is not,Found no) Python 3.11 or newer \
	with venv: install one, or name it with PYTHON=/path/to/python3.12." >&2; exit 1; }
ifneq ($(PYTHON),$(VENV)/bin/python)
	"$(PYTHON)" -m venv $(if $(wildcard $(VENV)/pyvenv.cfg),--clear) "$(VENV)"
endif
	@touch $@

$(READY): $(MADE) pyproject.toml
	@$(RUN) pip --version >/dev/null 2>&1 || $(RUN) ensurepip
	$(RUN) pip install --quiet --editable '.[$(EXTRAS)]' '$(TORCH_SPEC)'
	@touch $@
