# `make run` and `make test` set up by themselves; nothing else is needed.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
# constraints-tested.txt: exactly what the tests last passed with
CONSTRAINTS ?= constraints.txt
# LOCKED=1: the same, every file compared with its checksum
LOCKED ?=
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c $(CONSTRAINTS)

.PHONY: run test test-fast gpu soak race figures audit lock check setup setup-test format clean

run: setup
	$(BIN)/podium train neuron/quick

setup: .venv/.installed
setup-test: .venv/.installed-test

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("Podium needs Python 3.11 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv .venv

.venv/.installed: .venv/bin/python pyproject.toml constraints.txt
	@echo "installing Podium and what it needs into .venv (once)"
	$(if $(LOCKED),./scripts/install-locked $(BIN)/python locked.txt,$(PIP) -e .)
	@touch $@

.venv/.installed-test: .venv/.installed scripts/test-packages
	@echo "installing what the tests need into .venv (once)"
	$(if $(LOCKED),./scripts/install-locked $(BIN)/python locked.txt locked-test.txt,$(PIP) -e '.[test]')
	@./scripts/test-packages
	@touch $@

.venv/.installed-bench: .venv/.installed scripts/race-packages scripts/race-jax.txt
	@echo "installing what Podium is raced against into .venv (once)"
	$(PIP) -e '.[bench]'
	@./scripts/race-packages
	$(PYTHON) -m venv .venv/jax
	.venv/jax/bin/python -m pip install -q --disable-pip-version-check -r scripts/race-jax.txt
	@touch $@

test: setup-test check
	$(BIN)/pytest -m "not slow and not soak" -q -n 2
	$(BIN)/pytest -m "slow and not soak" -q -n 2 --dist loadfile

test-fast: setup-test
	$(BIN)/pytest -m "not slow and not soak" -q -n 2

# Tries on this machine's accelerators whether every promise holds, and writes a card about it.
gpu: setup
	.venv/bin/podium certify --out certificate

soak: setup-test
	PODIUM_EXAMPLES=explore $(BIN)/pytest -m "not slow and not soak" -q -n 2
	$(BIN)/pytest -m soak -q
	PODIUM_KILLS=50 $(BIN)/pytest tests/faults/test_lost_instances.py -k kills
	$(BIN)/pytest tests/faults/test_any_moment.py tests/faults/test_spare_copies.py
	$(BIN)/python -m bench.soak
	$(BIN)/python -m bench.soak --kills 15 --minutes 1.5 --spare
	PODIUM_HOSTILE=8 $(BIN)/pytest tests/hostile

race: .venv/.installed-bench
	$(BIN)/python -m bench.race

figures: .venv/.installed-bench
	$(BIN)/python -m bench.figures

.venv/audit/bin/pip-audit:
	@echo "installing pip-audit into .venv/audit (once)"
	$(PYTHON) -m venv .venv/audit
	.venv/audit/bin/python -m pip install -q --disable-pip-version-check pip-audit

audit: setup-test .venv/audit/bin/pip-audit
	@./scripts/audit $(BIN)/python .venv/audit/bin/pip-audit

.venv/lock/bin/uv:
	$(PYTHON) -m venv .venv/lock
	.venv/lock/bin/python -m pip install -q --disable-pip-version-check uv

# WHEELS: builds of torch that are published apart from the others
lock: setup-test .venv/lock/bin/uv
	./scripts/lock $(BIN)/python .venv/lock/bin/uv $(WHEELS)

check: setup-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup-test
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .import_linter_cache .pytest_cache .hypothesis src/*.egg-info
