# make demo   set-up, then the demonstration         make lint     style and types
# make test   set-up, then lint and all tests        make format   let ruff rewrite

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test lint format setup
.DEFAULT_GOAL := test

demo: setup
	$(BIN)/tra demo

test: lint
	$(BIN)/python -m pytest -n 2

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(READY)

KERNEL := $(wildcard tra/ops/threshold_relative/*.cpp tra/ops/threshold_relative/*.h)

$(READY): pyproject.toml setup.py constraints.txt $(KERNEL)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --quiet --editable '.[dev]'
	touch $@
