# Two commands do everything on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Demo and tests use local files only; no look-up should leave the machine.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test lint benchmark test-mergekit clean

# The stamp makes installation a matter of the first run, or of changed requirements.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,plot]'
	touch $@

demo: $(VENV)/.installed ## look at, merge and evaluate three agents that reinforcement learning trained
	rm -rf build/demo
	$(BIN)/mergekit-ram overlap example_configs/quickstart.yml --quiet
	$(BIN)/mergekit-yaml example_configs/quickstart.yml build/demo/merge --quiet
	$(BIN)/python -m benchmarks.agents.evaluate \
		base=./example_configs/agents/base \
		sort=./example_configs/agents/sort \
		cumsum=./example_configs/agents/cumsum \
		reverse=./example_configs/agents/reverse \
		merge=./build/demo/merge

test: $(VENV)/.installed ## run the tests
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(VENV)/.installed ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

benchmark: $(VENV)/.installed ## time the kernels against the memory bandwidth and the built-in
	$(BIN)/python -m benchmarks.kernel

test-mergekit: $(VENV)/.installed ## MergeKit's own released tests, with the plugin active
	$(BIN)/python -m tests.mergekit_suite

clean: ## remove what the other targets made
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
