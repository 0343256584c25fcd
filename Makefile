# Plain rules, so that the make 3.81 of macOS reads them too.
#
#   make PYTHON=/opt/python3.12/bin/python3 test                          another interpreter for .venv
#   make TORCH_INDEX=URL test                                             another index for the torch wheel
#   make WORKERS=0 PYTEST_ARGS="-x -k resume" test                        some tests in one process, where breakpoint() works

PYTHON =
TORCH_INDEX =
# One process of tests per core, but at most eight: each holds torch and transformers, and starts processes of its own. On a GPU use
# WORKERS=0, for some tests measure its memory.
WORKERS = logical --maxprocesses 8
PYTEST_ARGS =
# Which tests "make test" runs, by their marks.
TESTS = not long and not matrix
FAULTS = --cases 1000 --kills 100
PYTEST = $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)
BIN = .venv/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check
USABLE = import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))

# Many containers set it. Then no import keeps its bytecode, and every process compiles torch and transformers again, which takes longer than all
# else that it does when it starts.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test lint check check-all prove faults reference clean

help:
	@echo "make demo       train a small model on this computer and print what it learned"
	@echo "make test       the tests, one process per core; WORKERS=0 runs them in one, PYTEST_ARGS=\"-k resume\" chooses some"
	@echo "make check      lint, types, the long tests (rare variants, runs that learn) and a proof of every performance knob"
	@echo "make lint       ruff and mypy"
	@echo "make prove      a proof of every performance knob"
	@echo "make check-all  make check, and every combination of workers and shardings: resumes on others, 20 kills of workers and drivers"
	@echo "make faults     1,000 hostile inputs and 100 kills: docs/faults.md; make check runs a part of them"
	@echo "make reference  write docs/reference.md anew from the code"
	@echo "make clean      delete .venv, caches and build folders; runs/ stays"
	@echo "The first of these that needs it makes .venv and installs the versions of constraints.txt."

demo: .venv/ready
	$(BIN)/fulltilt demo

test: .venv/dev
	$(PYTEST) -m "$(TESTS)"

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

prove: .venv/dev
	$(BIN)/fulltilt prove --quiet --device cpu

faults: .venv/dev
	$(BIN)/python tests/faults $(FAULTS)

check: lint
	$(PYTEST) -m "long and not matrix"
	$(MAKE) prove
	$(MAKE) faults FAULTS="--cases 300"

check-all: check
	$(PYTEST) -m matrix

reference: .venv/ready
	$(BIN)/python -m fulltilt.reference > docs/reference.md.new
	mv docs/reference.md.new docs/reference.md

# torch goes first and alone, for whatever depends on it would otherwise choose its version. It also brings the setuptools that builds
# fulltilt, so no second one has to be fetched. Bytecode is left to the first import, which compiles only what is used.
.venv/ready: pyproject.toml constraints.txt
	@set -e; \
	if ! $(BIN)/python -c '$(USABLE)' 2>/dev/null; then \
		chosen=""; \
		for candidate in $(PYTHON) python3.13 python3.12 python3.11 python3; do \
			if "$$candidate" -c '$(USABLE)' 2>/dev/null; then chosen="$$candidate"; break; fi; \
		done; \
		if [ -z "$$chosen" ]; then \
			echo "fulltilt needs Python 3.11, 3.12 or 3.13 with its venv module, and found none."; \
			echo "Install one (Debian, Ubuntu: apt install python3 python3-venv; macOS: brew install python@3.13)"; \
			echo "or name one: make PYTHON=/path/to/python3 $(MAKECMDGOALS)"; \
			exit 1; \
		fi; \
		echo "Making .venv with $$chosen"; \
		"$$chosen" -m venv --clear .venv; \
	fi
	$(PIP) install --no-compile $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX),-c constraints.txt) "$$(grep '^torch==' constraints.txt)"
	$(PIP) install --no-compile -q -c constraints.txt --no-build-isolation -e .
	@touch $@

# What the tests need beside it: their tools (on Linux also triton, whose interpreter runs kernels on CPU), and every extra that runs without
# a GPU.
.venv/dev: .venv/ready
	$(PIP) install --no-compile -q -c constraints.txt --no-build-isolation -e ".[dev,math,peft,plot,tensorboard,wandb,mlflow,trackio,ray]"
	@touch $@

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
