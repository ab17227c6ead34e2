PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: train test test-core test-slow lint

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -e '.[dev]'
	touch $@

train: $(VENV)/installed
	$(BIN)/jaxmoe train configs/quickstart.toml

test: $(VENV)/installed
	$(BIN)/pytest -q -n 2 --dist loadfile

test-core: $(VENV)/installed
	$(BIN)/pytest -q -n 2 --dist loadfile -m core

test-slow: $(VENV)/installed
	$(BIN)/pip install -q -e '.[dev,hf,prove]'
	$(BIN)/pytest -q -n 2 --dist loadfile -m slow

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
