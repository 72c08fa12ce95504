# One verb a target. `make` alone lists them.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help tree

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

tree: ## torpor importable from the sources without installing: PYTHONPATH=build/py
	@mkdir -p build/py/torpor
	@for part in service actors native; do ln -sfn ../../../$$part build/py/torpor/$$part; done
	cmake -S . -B build/tree -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE=$$(command -v $(BIN)/python || command -v $(PYTHON)) >/dev/null
	cmake --build build/tree
	cp build/tree/_core*.so native/
