# One verb a target. `make` alone lists them.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# A GPU gets PyPI's own torch, everything else the pinned one (constraints/).
FLAVOUR := $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
PIP := $(BIN)/python -m pip --disable-pip-version-check
NATIVE := $(shell find native cmake CMakeLists.txt -name '*.cmake' -o -name '*.cpp' -o -name '*.hpp' -o -name '*.cu' -o -name CMakeLists.txt)
SOURCES := $(shell find service actors native -name '*.py' -o -name '*.pyi')
export PYTHONDONTWRITEBYTECODE := 1

.DEFAULT_GOAL := help
.PHONY: help setup run serve test links test-native test-sanitize test-python test-long bench lint tidy format tree stub openapi clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 18

setup: $(VENV)/installed model ## make .venv, install torpor into it, fetch the small model

$(VENV)/dependencies: pyproject.toml constraints/$(FLAVOUR).txt
	@echo "set-up 1/3: Python packages for $(FLAVOUR) into $(VENV)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q --upgrade 'pip>=25.1'
	$(PIP) install -q -c constraints/$(FLAVOUR).txt $$($(BIN)/python deploy/requirements.py $(FLAVOUR))
	$(PIP) install -q -c constraints/$(FLAVOUR).txt --group dev
	@touch $@

$(VENV)/installed: $(VENV)/dependencies $(NATIVE) $(SOURCES)
	@echo "set-up 2/3: the native core"
	PATH="$(abspath $(BIN)):$$PATH" $(PIP) install -q --no-build-isolation --no-deps --force-reinstall .
	@touch $@

.PHONY: model
model: $(VENV)/installed
	@echo "set-up 3/3: the small model"
	$(BIN)/python -m torpor.service.default_model

run: setup ## ask, sleep, see the memory free, be refused, wake, ask again
	$(BIN)/python -m torpor.service.walkthrough

serve: setup ## serve the small model on 127.0.0.1:8700 until interrupted
	$(BIN)/torpor serve

# The C++ programs run twice here, under sanitizers. As users would build them they run with test-native, before a
# native change is called done: CI has no time for a third build.
test: setup lint test-sanitize test-python ## lint, the C++ tests under sanitizers, the Python tests

test-native: $(VENV)/installed ## the C++ tests
	$(call native_tests,build/native,)

test-sanitize: $(VENV)/installed ## the C++ tests under ASan, UBSan and TSan
	$(call native_tests,build/asan,address$(comma)undefined)
	$(call native_tests,build/tsan,thread)

comma := ,
define native_tests
	PATH="$(abspath $(BIN)):$$PATH" cmake -S . -B $(1) -G Ninja -DTORPOR_TESTS=ON -DTORPOR_PYTHON=OFF -DTORPOR_SANITIZE=$(2) >/dev/null
	PATH="$(abspath $(BIN)):$$PATH" cmake --build $(1)
	PATH="$(abspath $(BIN)):$$PATH" ctest --test-dir $(1) --output-on-failure --parallel $$(nproc)
endef

# File by file on so many processes: much of the time is waiting for Ray. More than four would only start more Rays.
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 4 ? n : 4)))
test-python: setup ## the Python tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not long and not gpu" tests

test-long: setup ## what takes minutes; results are kept in tests/bench/results/
	$(BIN)/python -m pytest -m long tests

bench: $(VENV)/installed ## the benchmarks that need no GPU, into build/bench/; P10 takes 4 GiB of memory
	PATH="$(abspath $(BIN)):$$PATH" cmake -S . -B build/native -G Ninja -DTORPOR_TESTS=ON -DTORPOR_PYTHON=OFF >/dev/null
	PATH="$(abspath $(BIN)):$$PATH" cmake --build build/native --target p10_prefix_tree
	$(BIN)/python tests/bench/p10_prefixes.py --program build/native/tests/bench/p10_prefix_tree --json build/bench
	$(BIN)/python tests/bench/p4_host.py --json build/bench
	PYTHONPATH=tests $(BIN)/python tests/bench/p7_protocol.py --json build/bench
	PYTHONPATH=tests $(BIN)/python tests/bench/p9_front_door.py --json build/bench

lint: $(VENV)/installed links ## ruff, mypy --strict, clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $$(git ls-files '*.cpp' '*.hpp')
	$(BIN)/mypy

# A build folder that is only configured, so that the bindings' flags are in it, too. Headers are checked with what
# includes them. The static analyzer takes ten times as long as all other checks.
TIDIED := 'native/src/*.cpp' 'native/bindings/*.cpp' $(if $(TESTS),'tests/native/*.cpp')
tidy: $(VENV)/installed ## clang-tidy over the C++ core; TESTS=1: over its tests, too; ANALYZER=1: minutes more
	PATH="$(abspath $(BIN)):$$PATH" cmake -S . -B build/tidy -G Ninja -DTORPOR_TESTS=ON -DPython_EXECUTABLE=$(abspath $(BIN))/python -DCMAKE_EXPORT_COMPILE_COMMANDS=ON >/dev/null
	git ls-files $(TIDIED) | xargs -P $$(nproc) -n 1 $(BIN)/clang-tidy --quiet -p build/tidy $(if $(ANALYZER),--checks='clang-analyzer-*')

format: ## put everything into the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files '*.cpp' '*.hpp')

links: ## build/py: torpor importable from the sources
	@mkdir -p build/py/torpor
	@for part in service actors native; do ln -sfn ../../../$$part build/py/torpor/$$part; done

tree: links ## as links, with the extension built beside its sources: PYTHONPATH=build/py
	PATH="$(abspath $(BIN)):$$PATH" cmake -S . -B build/tree -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE=$(abspath $(BIN))/python >/dev/null
	PATH="$(abspath $(BIN)):$$PATH" cmake --build build/tree
	cp --remove-destination build/tree/_core*.so native/ # processes that run have the old one mapped

stub: tree ## native/_core.pyi, written anew from what native/bindings/ binds
	PYTHONPATH=build/py $(BIN)/python deploy/stub.py

openapi: links ## docs/openapi.json, written anew from the routes
	PYTHONPATH=build/py $(BIN)/python deploy/openapi.py

clean: ## remove what was built; .venv stays
	rm -rf build native/_core*.so
