# Every target builds its environment by itself; each recipe is one line.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
REAL := .venv-integrations# other libraries, as they are released
LOWEST := .venv-lowest# NumPy and SciPy alone, the lowest that pyproject.toml allows
LOWEST_EXTRAS := .venv-lowest-extras# with the lowest versions of the extras cli and data

# One test process a core, each with one thread. A file's tests share a process, and so its fixtures and its Ray cluster.
test test-integrations test-lowest coverage: export OMP_NUM_THREADS = 1

.PHONY: demo test test-integrations test-lowest coverage lint docs bench quality reproduce fuzz mutation licences clean

demo: $(READY)
	$(BIN)/vbtta demo --out runs/demo

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile --ignore tests/integrations

test-integrations: $(REAL)/.ready
	$(REAL)/bin/python -m pytest -n 2 --dist loadfile tests/integrations tests/test_integrations.py

FIRST_FLOOR := $(addprefix tests/test_,$(addsuffix .py,categorical_latent categorical_mixture crossval distributions fit fit_classification gaussian_latent gaussian_mixture laplace metrics policy random select))
WITH_EXTRAS := $(addprefix tests/test_,$(addsuffix .py,cli estimators files images labels predictions report tables))
test-lowest: $(LOWEST)/.ready $(LOWEST_EXTRAS)/.ready
	$(LOWEST)/bin/python -m pytest -n 2 $(FIRST_FLOOR) && $(LOWEST_EXTRAS)/bin/python -m pytest -n 2 --dist loadfile $(WITH_EXTRAS)

coverage: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile --ignore tests/integrations --cov --cov-report=term --cov-report=html

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

# A hundred thousand bad inputs; goes on where it stopped. Five minutes of it: make fuzz FUZZ="--minutes 5"
FUZZ ?= --out results/fuzz
fuzz: $(READY)
	$(BIN)/python -m benchmarks.fuzz $(FUZZ)

# Five hundred changed operators, numbers and conditions of the models: which of them do the contract's tests notice?
mutation: $(READY)
	$(BIN)/python -m benchmarks.mutation --out results/mutation

licences: $(READY)
	$(BIN)/python .ci/licences.py

clean:
	rm -rf $(VENV) $(REAL) $(LOWEST) $(LOWEST_EXTRAS) .mypy_cache .ruff_cache .pytest_cache .hypothesis site build dist

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV) && $(BIN)/pip install -q -c constraints.txt -e ".[dev]" && touch $@

# torchvision is built for CUDA: without its dependencies, or pip would fetch another torch.
$(REAL)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(REAL) && $(REAL)/bin/pip install -q -c constraints.txt --no-deps torchvision && $(REAL)/bin/pip install -q -c constraints.txt -e ".[integrations]" && touch $@

# What these releases need themselves is of their time, too: newer ones warn of it, and warnings are errors in the tests.
$(LOWEST_EXTRAS)/.ready: pyproject.toml
	$(PYTHON) -m venv $(LOWEST_EXTRAS) && $(LOWEST_EXTRAS)/bin/pip install -q -e . hypothesis jsonschema pytest-xdist $$(grep ^torch== constraints.txt) "click<8.3" "pyparsing<3.2" "pytest<9" $$(grep -E '^(dependencies|cli|data) =' pyproject.toml | grep -o '[a-z0-9-]*>=[0-9.]*' | sed 's/>=/==/' | sort -u) && touch $@

$(LOWEST)/.ready: pyproject.toml
	$(PYTHON) -m venv $(LOWEST) && $(LOWEST)/bin/pip install -q -e . hypothesis pytest pytest-xdist $$(grep ^dependencies pyproject.toml | grep -o '[a-z]*>=[0-9.]*' | sed 's/>=/==/') && touch $@
