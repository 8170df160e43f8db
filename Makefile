# Every target builds its environment by itself; each recipe is one line.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint docs bench quality reproduce clean

demo: $(READY)
	$(BIN)/vbtta demo --out runs/demo

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadgroup

lint: $(READY)
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(READY)
	$(BIN)/python -m benchmarks --out results/bench

quality: $(READY)
	$(BIN)/python -m benchmarks.quality --out results/quality

# Data from VBTTA_DATA, or: make reproduce ARGS="all --data FOLDER"
ARGS ?= all
reproduce: $(READY)
	$(BIN)/python -m reproduction $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis site build dist

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV) && $(BIN)/pip install -q -c constraints.txt -e ".[dev]" && touch $@
