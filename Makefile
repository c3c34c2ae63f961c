# One command each; bare `make` lists them. Environments are built on a bare machine with Python 3.11 or later.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check
SEEDS ?= 200
FIRST ?= 0
# What runs once more on the CPU's kernels.
ON_NUMBA := $(addprefix tests/parity/test_,serving.py spec_matrix.py session_matrix.py spec_trees.py spec_exact.py sampling_exact.py one_text.py)

.DEFAULT_GOAL := help
.PHONY: help serve test test-ray test-full check install-check lock sim replay planted table modes bench bench-serving bench-spec bench-sessions format clean

# List the targets.
help:
	@awk '/^# / { said = substr($$0, 3); next } \
	  /^[a-z-]+:/ && said { sub(/:.*/, ""); printf "make %-15s %s\n", $$0, said } { said = "" }' $(MAKEFILE_LIST)

$(VENV)/.server: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  f"Roost needs Python 3.11 or later, this is {sys.version.split()[0]}: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[server]'
	touch $@

$(VENV)/.ready: $(VENV)/.server
	$(INSTALL) -e '.[test]'
	$(INSTALL) --no-deps 'instructor>=1.17' # it names an older jiter than OpenAI's newest client does, and works with either
	touch $@

# A server with the default model at http://127.0.0.1:8000; FLAGS go to `roost serve`.
serve: $(VENV)/.server
	$(BIN)/roost serve $(FLAGS)

$(VENV)/.ray: $(VENV)/.ready
	$(INSTALL) -e '.[ray]'
	touch $@

# Everything that must hold before a change lands.
test: check
	$(BIN)/python -m tests.sim --seeds $(SEEDS) --first $(FIRST)
	$(BIN)/pytest tests -n 2 --dist loadgroup
	ROOST_TEST_BACKEND=numba $(BIN)/pytest $(ON_NUMBA) -n 2 --dist loadgroup

# Replicas on Ray Serve, on this machine; `make test` leaves them out where Ray (80 MB) is not installed.
test-ray: $(VENV)/.ray
	$(BIN)/pytest tests/ray -m ""

# The same with a thousand seeds, a search for every planted bug, Ray and the tests marked full.
test-full: check $(VENV)/.ray
	$(BIN)/python -m tests.sim --seeds 1000
	$(BIN)/python -m tests.planted
	$(BIN)/pytest tests -n 2 --dist loadgroup -m ""

# Format, lint, types and house rules.
check: $(VENV)/.ready
	$(BIN)/ruff format --check src tests bench examples
	$(BIN)/ruff check src tests bench examples
	$(BIN)/mypy
	$(BIN)/pytest tests/tidy

# Resolve what `make serve` and `make test` install against the plain index, for each Python; nothing is installed.
install-check:
	$(PYTHON) -m tests.install

# Write the versions of this environment to requirements-dev.lock, for others to reproduce it.
lock: $(VENV)/.ready
	$(BIN)/python -m tests.install.lock

# Put every file in the form that `make check` wants.
format: $(VENV)/.ready
	$(BIN)/ruff format src tests bench examples
	$(BIN)/ruff check --fix src tests bench examples

# Simulation: SEEDS seeds from FIRST on; a failure prints the command that replays it.
sim: $(VENV)/.ready
	$(BIN)/python -m tests.sim --seeds $(SEEDS) --first $(FIRST)

# One seed with its event log: make replay SEED=17
replay: $(VENV)/.ready
	$(BIN)/python -m tests.sim --replay $(SEED)

# Search a failing seed for every planted bug and write docs/PLANTED.md.
planted: $(VENV)/.ready
	$(BIN)/python -m tests.planted

# Run the tests of every request option and write docs/OPTIONS.md.
table: $(VENV)/.ready
	$(BIN)/python -m tests.parity.table

# Write which tests and planted bugs stand for each failure mode to docs/FAILURE_MODES.md.
modes: $(VENV)/.ready
	$(BIN)/python -m tests.tidy.modes

# The default model on this machine: rates, start time, sizes. JSON=path writes the numbers.
bench-serving: $(VENV)/.ready
	$(BIN)/python -m bench.serving $(if $(JSON),--json $(JSON))

# Speculation beside plain decoding: accept lengths, rates, costs. PROMPTS=file, DRAFT=folder, JSON=path.
bench-spec: $(VENV)/.ready
	$(BIN)/python -m bench.speculation $(if $(PROMPTS),--prompts $(PROMPTS)) $(if $(DRAFT),--draft $(DRAFT)) $(if $(JSON),--json $(JSON))

# Sessions: flat turns, first tokens against sending everything again, idle sessions, host time. JSON=path.
bench-sessions: $(VENV)/.ready
	$(BIN)/python -m bench.sessions $(if $(JSON),--json $(JSON))

# Host time of the control plane.
bench: $(VENV)/.ready
	$(BIN)/python -m bench.host

# Remove the environment and everything that was built.
clean:
	rm -rf $(VENV) build dist src/roost.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
