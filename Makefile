# make demo   set up .venv, then the main job: plan, train on 4 processes, compare with one
# make test   set up .venv, then all checks and tests; of parametrized tests some cases
# make test-all   the same with every case: three times the time, before a release
# make types   set up .venv, then check types (a part of `make test`)
# make docs   set up .venv, then the documents as a site: build/site/README.html
#
# All need Python 3.10 or newer, pip and make, and download nothing but packages.

BASE := $(shell python3.11 -c 'import sys; print(sys.executable)' 2>/dev/null || command -v python3)
BIN := .venv/bin

# Types are checked, by one process, while the tests run. Of the three that run tests two begin with
# those of several ranks, for which they wait. Two cores are busy then: a fourth makes it no faster.
# Tests start several processes on few cores: one thread each is both faster and repeatable. Those
# that start Python a hundred times need compiled modules, whatever the shell says.
test test-all: export OMP_NUM_THREADS = 1
test test-all: export PYTHONHASHSEED = 0
test test-all: export PYTHONDONTWRITEBYTECODE =
test: CASES := some
test-all: CASES := all

.PHONY: demo docs test test-all types
.DEFAULT_GOAL := test

demo: .venv/stamp-examples
	$(BIN)/python examples/gpt2/demo.py

docs: .venv/stamp-docs
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -c docs . build/site

types: .venv/stamp-types
	$(BIN)/basedpyright --level error

test test-all: .venv/stamp-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	mkdir -p build
	$(BIN)/basedpyright --level error > build/types.txt & types=$$!; \
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder --cases $(CASES); \
	result=$$?; wait $$types || result=1; cat build/types.txt; exit $$result

.venv/stamp-%: pyproject.toml
	test -x $(BIN)/python || $(BASE) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	touch $@
