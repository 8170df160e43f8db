# Every target builds its environment by itself; each recipe is one line.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
REAL := .venv-integrations# other libraries, as they are released

.PHONY: demo test test-integrations lint docs bench quality reproduce clean

demo: $(READY)
	$(BIN)/vbtta demo --out runs/demo

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadgroup --ignore tests/integrations

test-integrations: $(REAL)/.ready
	$(REAL)/bin/python -m pytest -n 2 --dist loadgroup tests/integrations tests/test_integrations.py

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
	rm -rf $(VENV) $(REAL) .mypy_cache .ruff_cache .pytest_cache .hypothesis site build dist

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV) && $(BIN)/pip install -q -c constraints.txt -e ".[dev]" && touch $@

# torchvision is built for CUDA: without its dependencies, or pip would fetch another torch.
$(REAL)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(REAL) && $(REAL)/bin/pip install -q -c constraints.txt --no-deps torchvision && $(REAL)/bin/pip install -q -c constraints.txt -e ".[integrations]" && touch $@
