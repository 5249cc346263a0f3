# Every target makes .venv itself when it is missing, or older than pyproject.toml or constraints.txt.

PYTHON ?= python3
VENV := .venv
PEERS := .venv-peers
RAY := .venv-ray
BIN := $(VENV)/bin
PIP_INSTALL := -m pip install -qq --disable-pip-version-check
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)

export OMP_NUM_THREADS ?= 1
# Each has kept ranks of its own, of up to 8 processes. Three on two cores: tests of time limits and restarts mostly wait.
TEST_PROCESSES ?= 3
# In the order of tests/order.py.
BY_FILE := --dist loadfile --no-loadscope-reorder

PROSE := docs $(wildcard *.md)

.DEFAULT_GOAL := help
.PHONY: help demo test check format soak repeat clusters bench peers side-by-side lock test-gpu other-torch clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | awk -F'\t' '{ printf "make %-13s %s\n", $$1, $$2 }'

demo: $(VENV)/.stamp ## train a small model on two CPU processes
	@$(BIN)/echelon launch --cpu --num_processes 2 examples/mnist_accelerator.py

test: $(VENV)/.stamp ## run every test that needs no GPU
	@$(BIN)/python -m pytest -m "not soak and not gpu" -n $(TEST_PROCESSES) $(BY_FILE)

check: $(VENV)/.stamp ## format, lint, spelling, prose, types, layers
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/codespell $(PROSE) src tests examples benchmarks Makefile pyproject.toml
	@$(BIN)/proselint check --config .proselintrc.json $(PROSE)
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/python -m pytest tests/test_layering.py tests/test_import_contracts.py

format: $(VENV)/.stamp ## rewrite the files as `make check` wants them
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --fix .

# pytest's exit status 5 is "no test was selected". -rs: what was left out, and why.
soak: $(VENV)/.stamp ## run the slow tests (after make clusters: also those on Slurm and Ray)
	@$(BIN)/python -m pytest -m soak -rs || [ $$? -eq 5 ]
	@$(MAKE) --no-print-directory repeat

# In pieces, so that a failure says which file it is; BESIDE: so many busy loops run meanwhile. RECORD: a file to go on from after
# a stop.
TIMES ?= 20
BESIDE ?= 2
repeat: $(VENV)/.stamp ## run the tests that start processes again and again: make repeat TIMES=20 BESIDE=2
	@$(BIN)/python -m tests.repeat --times $(TIMES) --beside $(BESIDE) $(if $(RECORD),--record $(RECORD))

clusters: $(RAY)/.stamp ## install what make soak needs to run jobs of Slurm and Ray
	@test -n "$$(PATH="$$PATH:/usr/sbin" command -v slurmctld)" || \
	{ test "$$(id -u)" = 0 && apt-get install -qq -y --no-install-recommends slurm-wlm munge > /dev/null; } || \
	{ echo "NOT INSTALLED: Slurm; as root: apt-get update && apt-get install slurm-wlm munge" >&2; exit 1; }

test-gpu: $(VENV)/.stamp ## run the tests that need an accelerator
	@$(BIN)/python -m pytest -m gpu || [ $$? -eq 5 ]

# Installs whatever that torch depends on: gigabytes of CUDA, where the index has no build for CPUs. WITH: what must fit that
# torch, and pip cannot know (torchao==0.13.0 for 2.8).
OTHER := .venv-torch-$(OTHER_TORCH)
other-torch: ## run the tests on another torch: make other-torch OTHER_TORCH=2.8.0 PYTHON=python3.10 WITH=torchao==0.13.0
	@test -n "$(OTHER_TORCH)" || { echo "say which: make other-torch OTHER_TORCH=2.8.0" >&2; exit 2; }
	@test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	@$(OTHER)/bin/python $(PIP_INSTALL) torch==$(OTHER_TORCH)
	@$(OTHER)/bin/python $(PIP_INSTALL) torch==$(OTHER_TORCH) $(WITH) -e '.[dev]'
	@$(OTHER)/bin/python -m pytest -m "not soak and not gpu" -n $(TEST_PROCESSES) $(BY_FILE) tests/unit tests/ranks tests/launch

# Beside the peers when `make peers` was run; without them the benchmarks say what they leave out.
bench: $(VENV)/.stamp ## run the benchmarks (after make peers: beside accelerate, transformers, lightning)
	@set -e; python=$(BIN)/python; test ! -e $(PEERS)/.stamp || python=$(PEERS)/bin/python; \
	for file in benchmarks/*.py; do echo "== $$file"; $$python $$file; done

peers: $(PEERS)/.stamp ## make .venv-peers: what the benchmarks and side-by-side tests compare with

# From an empty environment, so that what nothing needs any more falls out.
lock: ## refresh constraints.txt from pyproject.toml
	@set -e; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	$(PYTHON) -m venv "$$folder"; \
	"$$folder/bin/python" $(PIP_INSTALL) torch==$(TORCH); \
	"$$folder/bin/python" $(PIP_INSTALL) -e '.[dev]'; \
	{ echo "# Every version that make's .venv installs. Refresh: make lock."; \
	  "$$folder/bin/python" -m pip freeze --exclude-editable | sed 's/+[a-z0-9.]*$$//'; } > "$$folder/new"; \
	cat "$$folder/new" > constraints.txt

side-by-side: $(VENV)/.stamp $(PEERS)/.stamp ## run scripts written for accelerate on it and on echelon, and compare
	@REQUIRE_PEERS=1 $(BIN)/python -m pytest tests/side_by_side

clean: ## remove the environments and the caches
	@rm -rf $(VENV) $(PEERS) $(RAY) .venv-torch-* .mypy_cache .ruff_cache .pytest_cache dist build outputs

# torch goes alone and first: what depends on it must find the pinned build in place, and pull no other.
$(VENV)/.stamp: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python $(PIP_INSTALL) -c constraints.txt torch==$(TORCH)
	@$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e '.[dev]'
	@touch $@

$(PEERS)/.stamp: pyproject.toml benchmarks/peers.txt benchmarks/peers-constraints.txt
	@test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	@$(PEERS)/bin/python $(PIP_INSTALL) -c benchmarks/peers-constraints.txt $$(grep '^torch==' benchmarks/peers.txt)
	@$(PEERS)/bin/python $(PIP_INSTALL) -c benchmarks/peers-constraints.txt -r benchmarks/peers.txt
	@touch $@

# Ray brings 300 MB that nothing else needs; torch and the rest are those of .venv.
$(RAY)/.stamp: $(VENV)/.stamp tests/clusters/requirements.txt
	@test -x $(RAY)/bin/python || $(PYTHON) -m venv $(RAY)
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' > \
		"$$($(RAY)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth"
	@$(RAY)/bin/python $(PIP_INSTALL) -c constraints.txt -r tests/clusters/requirements.txt
	@touch $@
