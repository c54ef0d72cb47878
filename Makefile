# RL Lab: two commands to begin with, `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo test check learn bench chaos clean

demo: $(STAMP)
	$(BIN)/rl-lab demo

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not learning and not gpu and not chaos" tests

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

learn: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m learning tests/learning

chaos: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m chaos tests

bench: $(STAMP)
	$(BIN)/python benchmarks/model_free_cpu.py

# The environment is made once, with pip, and again when the dependencies change.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $(STAMP)

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
