# `make demo` trains P4CNN against Z2CNN, `make test` runs every check; both set up .venv first, and install nothing elsewhere.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint types docs kernels format bench clean

demo: $(VENV)/.installed
	$(BIN)/gcnn demo --out out/demo

test: lint types docs
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.installed
	$(BIN)/mypy

docs: $(VENV)/.installed
	$(BIN)/python docs/figures.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/bench.py --quick

# the kernels for GPUs in Triton's interpreter, and by its compiler: three minutes, on Linux; make test has them too once Triton is installed
kernels: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet "triton>=3.4,<3.9"
	TRITON_INTERPRET=1 $(BIN)/python tests/triton_laws.py
	$(BIN)/python tests/triton_fits.py

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# installed again only when what to install has changed, so that a second run starts at once and needs no network
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .cache out site
