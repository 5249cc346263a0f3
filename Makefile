# Every target creates .venv if it is missing or older than pyproject.toml, requirements-dev.txt or constraints.txt.

PYTHON ?= python3
VENV := .venv
PEERS := .venv-peers
RAY := .venv-ray
ECOSYSTEM := .venv-ecosystem
TOOLS := .venv-llamafactory .venv-swift
RELEASE := .venv-release
DOCS := .venv-docs
BIN := $(VENV)/bin
PIP_INSTALL := -m pip install -qq --disable-pip-version-check
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)

export OMP_NUM_THREADS ?= 1
# With this variable, each of the processes that the tests start compiles echelon anew: a minute of `make test`.
unexport PYTHONDONTWRITEBYTECODE
# Each test process keeps up to 8 rank processes. Three on two cores, because tests of time limits and restarts mostly wait.
TEST_PROCESSES ?= 3
# In the order of tests/order.py.
BY_FILE := --dist loadfile --no-loadscope-reorder

# The tests of one folder of src/echelon: make test FOLDER=checkpoint.
TESTS = $(if $(FOLDER),$(or $(wildcard $(addsuffix $(FOLDER),tests/ tests/unit/ tests/ranks/ tests/launch/)),tests/unit/$(FOLDER)))

# Tests of the source's structure and of the documents, which `make check` runs.
RULES := tests/test_layering.py tests/test_import_contracts.py tests/test_private_names.py tests/test_documents.py
PROSE := docs $(wildcard *.md)

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check format messages soak repeat browser clusters bench bench-check peers side-by-side ecosystem docs docs-serve lock release-check test-gpu gpu-day other-torch clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | awk -F'\t' '{ printf "make %-13s %s\n", $$1, $$2 }'

demo: $(VENV)/.base ## train a small model on two CPU processes, and write a page about the run
	@$(BIN)/echelon launch --cpu --num_processes 2 examples/mnist_accelerator.py
	@$(BIN)/echelon report
	@echo "next: $(BIN)/echelon launch --cpu --num_processes 2 examples/mnist_trainer.py, the same training run without a loop"
	@echo "      make test, the tests; docs/tour.md, the tutorial"

test: $(VENV)/.stamp ## run the tests that take less than a second or so, in five minutes: before each commit; of one folder: FOLDER=checkpoint
	@$(BIN)/python -m pytest -m "not slow and not soak and not gpu" -n $(TEST_PROCESSES) $(BY_FILE) $(RULES:%=--ignore=%) $(TESTS)

test-all: test ## run all tests that do not require a GPU
	@$(BIN)/python -m pytest -m "slow and not soak and not gpu" -n $(TEST_PROCESSES) $(BY_FILE) $(RULES:%=--ignore=%) $(TESTS) || [ $$? -eq 5 ]

check: $(VENV)/.stamp ## check format, lint, spelling, prose, links, types, layers, calls per training step
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/codespell $(PROSE) src tests examples benchmarks Makefile pyproject.toml
	@$(BIN)/proselint check --config .proselintrc.json $(PROSE)
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/python -m pytest $(RULES)
	@$(BIN)/python benchmarks/hot_path.py --check

format: $(VENV)/.stamp ## reformat the files for `make check`
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --fix .

messages: $(VENV)/.stamp ## write new messages into src/echelon/locale, and remove those that are gone
	@$(BIN)/python -m tests.messages

# pytest's exit status 5 means that no test was selected. -rs lists skipped tests with the reasons.
soak: $(VENV)/.stamp ## run the slow tests (after make clusters, including those on Slurm and Ray)
	@$(BIN)/python -m pytest -m soak -rs || [ $$? -eq 5 ]
	@$(MAKE) --no-print-directory repeat

# One run per file, so that a failure names the file. BESIDE: number of busy loops that run meanwhile. RECORD: a file from which to
# resume after an interruption.
TIMES ?= 20
BESIDE ?= 2
repeat: $(VENV)/.stamp ## repeat the tests that start processes: make repeat TIMES=20 BESIDE=2
	@$(BIN)/python -m tests.repeat --times $(TIMES) --beside $(BESIDE) $(if $(RECORD),--record $(RECORD))

clusters: $(RAY)/.stamp ## install Slurm and Ray for make soak
	@test -n "$$(PATH="$$PATH:/usr/sbin" command -v slurmctld)" || \
	{ test "$$(id -u)" = 0 && apt-get install -qq -y --no-install-recommends slurm-wlm munge > /dev/null; } || \
	{ echo "NOT INSTALLED: Slurm; as root: apt-get update && apt-get install slurm-wlm munge" >&2; exit 1; }

browser: ## install Chromium for the tests of the report page
	@test -n "$$(command -v chromium || command -v chromium-browser || command -v google-chrome)" || \
	{ test "$$(id -u)" = 0 && apt-get install -qq -y --no-install-recommends chromium > /dev/null; } || \
	{ echo "NOT INSTALLED: Chromium; as root: apt-get update && apt-get install chromium" >&2; exit 1; }

test-gpu: $(VENV)/.stamp ## run the tests that require an accelerator
	@$(BIN)/python -m pytest -m gpu || [ $$? -eq 5 ]

BUDGET ?= 480
gpu-day: $(VENV)/.stamp ## check and measure everything that needs a GPU: make gpu-day BUDGET=480
	@$(BIN)/python benchmarks/gpu_day.py --budget $(BUDGET) --out gpu-day

# Installs all dependencies of that torch, including gigabytes of CUDA if the index has no CPU build. WITH: packages whose versions
# must match that torch but that pip cannot resolve (torchao==0.13.0 for 2.8).
OTHER := .venv-torch-$(OTHER_TORCH)
other-torch: ## run the tests with another torch: make other-torch OTHER_TORCH=2.8.0 PYTHON=python3.10 WITH=torchao==0.13.0
	@test -n "$(OTHER_TORCH)" || { echo "OTHER_TORCH is not set: make other-torch OTHER_TORCH=2.8.0" >&2; exit 2; }
	@test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	@$(OTHER)/bin/python $(PIP_INSTALL) torch==$(OTHER_TORCH)
	@$(OTHER)/bin/python $(PIP_INSTALL) torch==$(OTHER_TORCH) $(WITH) -e . -r requirements-dev.txt
	@$(OTHER)/bin/python -m pytest -m "not soak and not gpu" -n $(TEST_PROCESSES) $(BY_FILE) tests/unit tests/ranks tests/launch

# Uses the environment of `make peers` if it exists; otherwise the benchmarks list the libraries that they skip.
bench: $(VENV)/.stamp ## run the benchmarks (after make peers, compared with accelerate, transformers, lightning)
	@set -e; python=$(BIN)/python; test ! -e $(PEERS)/.stamp || python=$(PEERS)/bin/python; \
	for file in $(filter-out benchmarks/gpu_% benchmarks/results.py,$(wildcard benchmarks/*.py)); do echo "== $$file"; $$python $$file; done

bench-check: $(VENV)/.stamp ## compare the Python calls that echelon adds to a training step with those in benchmarks/hot_path.json
	@$(BIN)/python benchmarks/hot_path.py --check

peers: $(PEERS)/.stamp ## create .venv-peers for the benchmarks and side-by-side tests

# --strict: a warning (a broken link, a page outside the navigation, a docstring that cannot be read) is an error. The variable
# silences a notice of the theme about mkdocs 2.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs
docs: $(DOCS)/.stamp ## build the documentation site into site/
	@mkdir -p build/docs && $(MKDOCS) build --strict --quiet
	@echo "site/index.html"

docs-serve: $(DOCS)/.stamp ## show the documentation site at http://127.0.0.1:8000, and rebuild it when a page changes
	@mkdir -p build/docs && $(MKDOCS) serve --strict

# Starts from an empty environment, so that packages that are no longer needed are dropped.
lock: ## refresh constraints.txt from pyproject.toml and requirements-dev.txt
	@set -e; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	$(PYTHON) -m venv "$$folder"; \
	"$$folder/bin/python" $(PIP_INSTALL) torch==$(TORCH); \
	"$$folder/bin/python" $(PIP_INSTALL) -e . -r requirements-dev.txt; \
	{ echo "# Every version that make's .venv installs. Refresh: make lock."; \
	  "$$folder/bin/python" -m pip freeze --exclude-editable | sed 's/+[a-z0-9.]*$$//'; } > "$$folder/new"; \
	cat "$$folder/new" > constraints.txt

side-by-side: $(VENV)/.stamp $(PEERS)/.stamp ## run scripts written for accelerate with accelerate and echelon, and compare
	@REQUIRE_PEERS=1 $(BIN)/python -m pytest tests/side_by_side

ecosystem: $(VENV)/.stamp $(ECOSYSTEM)/.stamp $(TOOLS:%=%/.stamp) ## run trl, diffusers, LLaMA-Factory, ... natively and on echelon, and compare
	@REQUIRE_ECOSYSTEM=1 $(BIN)/python -m pytest -m soak tests/ecosystem

# Installs torch into a new environment, with constraints.txt.
release-check: $(VENV)/.stamp $(RELEASE)/.stamp docs ## build the last commit twice, compare, check, try in an empty environment; result: dist
	@REQUIRE_RELEASE=1 $(BIN)/python -m pytest -x -m soak tests/release
	@ls -l dist

clean: ## remove the environments and the caches
	@rm -rf $(VENV) $(PEERS) $(RAY) $(ECOSYSTEM) $(TOOLS) $(RELEASE) $(DOCS) .venv-torch-* .mypy_cache .ruff_cache .pytest_cache dist build site outputs

# torch is installed first, so that packages that depend on it find the pinned build and do not install another.
# What a user installs; $(VENV)/.stamp adds what the tests need.
$(VENV)/.base: pyproject.toml constraints.txt
	@echo "installing torch and echelon in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python $(PIP_INSTALL) -c constraints.txt torch==$(TORCH)
	@$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e .
	@touch $@

$(VENV)/.stamp: $(VENV)/.base requirements-dev.txt
	@echo "installing the tools of the tests in $(VENV)"
	@$(BIN)/python $(PIP_INSTALL) -c constraints.txt -r requirements-dev.txt
	@touch $@

$(PEERS)/.stamp: pyproject.toml benchmarks/peers.txt benchmarks/peers-constraints.txt
	@test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	@$(PEERS)/bin/python $(PIP_INSTALL) -c benchmarks/peers-constraints.txt $$(grep '^torch==' benchmarks/peers.txt)
	@$(PEERS)/bin/python $(PIP_INSTALL) -c benchmarks/peers-constraints.txt -r benchmarks/peers.txt
	@touch $@

$(RELEASE)/.stamp: tests/release/requirements.txt
	@test -x $(RELEASE)/bin/python || $(PYTHON) -m venv $(RELEASE)
	@$(RELEASE)/bin/python $(PIP_INSTALL) -r tests/release/requirements.txt
	@touch $@

$(ECOSYSTEM)/.stamp: pyproject.toml $(foreach name,requirements no-deps constraints,tests/ecosystem/$(name).txt)
	@test -x $(ECOSYSTEM)/bin/python || $(PYTHON) -m venv $(ECOSYSTEM)
	@$(ECOSYSTEM)/bin/python $(PIP_INSTALL) -c tests/ecosystem/constraints.txt $$(grep '^torch==' tests/ecosystem/requirements.txt)
	@$(ECOSYSTEM)/bin/python $(PIP_INSTALL) -c tests/ecosystem/constraints.txt -r tests/ecosystem/requirements.txt
	@$(ECOSYSTEM)/bin/python $(PIP_INSTALL) --no-deps -r tests/ecosystem/no-deps.txt
	@touch $@

# These tools need older releases of some packages; all others are those of .venv-ecosystem.
$(TOOLS:%=%/.stamp): .venv-%/.stamp: tests/ecosystem/%.txt $(ECOSYSTEM)/.stamp
	@test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	@$(ECOSYSTEM)/bin/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' > \
		"$$(.venv-$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth"
	@.venv-$*/bin/python $(PIP_INSTALL) --no-deps -r $<
	@touch $@

$(DOCS)/.stamp: docs/requirements.txt
	@test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python $(PIP_INSTALL) -r docs/requirements.txt
	@touch $@

# Ray adds 300 MB that nothing else needs; torch and the other packages are those of .venv.
$(RAY)/.stamp: $(VENV)/.stamp tests/clusters/requirements.txt
	@test -x $(RAY)/bin/python || $(PYTHON) -m venv $(RAY)
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' > \
		"$$($(RAY)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth"
	@$(RAY)/bin/python $(PIP_INSTALL) -c constraints.txt -r tests/clusters/requirements.txt
	@touch $@
