# What a newcomer, a developer and CI run. Each verb sets up what it needs; the second time that takes no time.
#   PYTHON=python3.12   the Python to use (default: the first of python3.13, 3.12, 3.11 and python3 that can)
#   TORCH=skip, TORCH_INDEX=URL   another build of torch than the CPU one: see deploy/install-torch
#   LOCKED=1            the exact versions of deploy/locks, by their hashes, as CI does (default: the newest that pyproject.toml takes)
#   V=1                 what tests print, also of stages that pass
#   ARGS='-k rollback -x'         further arguments of pytest, of the demo or of the benchmark
.DEFAULT_GOAL := help
.PHONY: help demo unit test reliability thorough check simulation fuzz soak chaos bench bench-gpu sglang vllm stores core lowest areal trainers plugin-releases browser screenshots demo-svg docs docs-links reference clean
.DELETE_ON_ERROR:

PYTHON ?=
ARGS ?=
export PYTHON TORCH TORCH_INDEX LOCKED
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Without bytecode, each worker of pytest and each process that a test starts compiles every module of refitd again.
unexport PYTHONDONTWRITEBYTECODE

# The first case of the simulation and how many steps it takes, where they are not drawn or the usual ones.
SEED ?= $(shell od -An -N4 -tu4 /dev/urandom | tr -d ' ')
STEPS ?=

# How many cases each fuzzer takes.
FUZZ ?= 3000

RELEASES ?= 0.5.12.post1 0.5.16 0.5.19

SGLANG_PYTHON ?= python3

BIN := .venv/bin
# Tests are started near those that share an engine with them, and a worker that has none left takes some of another's.
PYTEST = $(BIN)/python -m pytest -q --dist worksteal
QUICK = not thorough and not sglang and not vllm and not stores
READY := .venv/$(if $(LOCKED),.locked,.ready)
DOCS := .venv/.docs

help: ## show this list
	@awk -F ':[^#]*## ' '/^[a-z0-9-]+:[^#]*## / { printf "make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## watch two engines follow a trainer that really learns, and what breaks end well (ARGS='--plain': for logs)
	@$(BIN)/refitd demo $(ARGS)

unit: $(READY) ## run the unit tests alone, on all cores
	@$(PYTEST) -n auto tests/unit $(ARGS)

# Tests with real processes wait more than they compute: there are more of them at a time than cores.
test: $(READY) ## run the quick tests of what refitd does: unit, integration, end to end, the pages
	@tests/prometheus/install .promtool || echo "the alert rules are not tested: the tests say why"
	@tests/postgres/install || echo "journals in PostgreSQL are not tested: the tests say why"
	@tests/beside \
	  tests/stage unit $(PYTEST) -n auto tests/unit tests/repository -m '$(QUICK)' $(ARGS) + \
	  tests/stage processes $(PYTEST) -n 4 tests/integration tests/docs tests/e2e -m '$(QUICK)' $(ARGS)

reliability: $(READY) ## run the tests of what refitd must survive: kills, faults, attacks, takeovers, the simulation
	@tests/postgres/install || echo "journals in PostgreSQL are not tested: the tests say why"
	@tests/stage reliability $(PYTEST) -n 4 tests/reliability -m '$(QUICK)' $(ARGS)

thorough: $(READY) ## run what those two leave out: every crash point, mutants, sweeps of attacks, the commands of the pages
	@tests/envoy/install .envoy || echo "Envoy is not tested: the tests say why"
	@tests/nginx/install .nginx || echo "nginx is not tested: the tests say why"
	@REFITD_EVERY_POINT=1 REFITD_SIMULATION_STEPS=3000 \
	tests/stage thorough $(PYTEST) -n 3 -m '(thorough or points) and not sglang and not vllm and not stores' \
	  tests/repository tests/integration tests/docs tests/reliability tests/e2e $(ARGS)

check: $(READY) ## lint, formatting, imports between packages and of what is declared, and types
	@$(BIN)/ruff check client service tests docs examples
	@$(BIN)/ruff format --check client service tests docs examples
	@$(BIN)/lint-imports --no-cache --no-logo
	@$(BIN)/deptry client service
	@$(BIN)/pyright

simulation: $(READY) ## 10,000 steps of the simulation, on one host and on several, from a seed that is drawn and shown (SEED=7 STEPS=1: that case again)
	@seed=$(SEED); echo "the first case of the simulation is $$seed: 'make simulation SEED=$$seed' takes the same steps"; \
	REFITD_SIMULATION_SEED=$$seed REFITD_SIMULATION_STEPS=$(or $(STEPS),$(REFITD_SIMULATION_STEPS),10000) REFITD_SIMULATION_SHARES=2 \
	$(BIN)/python -m pytest tests/reliability/simulation -q -n 2 -k whatever_comes $(ARGS)

fuzz: $(READY) ## change what files, engines and plugins send, in other ways each time, for about two minutes (FUZZ=100000: an hour)
	@REFITD_FUZZ=$(FUZZ) $(BIN)/python -m pytest tests/reliability/attack/test_attack_parsers.py tests/reliability/attack/test_attack_answers.py -q --timeout 7200 $(ARGS)

soak: $(READY) ## a million steps of the simulation and unseen cases for the unit tests, on all cores (about three hours on two)
	@$(BIN)/python -m pytest tests/unit -q -n auto --hypothesis-profile=default
	@seed=$(SEED); echo "the first case of the simulation is $$seed: 'make soak SEED=$$seed' takes the same steps"; \
	REFITD_SIMULATION_SEED=$$seed REFITD_SIMULATION_STEPS=$(or $(STEPS),$(REFITD_SIMULATION_STEPS),1000000) REFITD_SIMULATION_SHARES=40 $(BIN)/python -m pytest tests/reliability/simulation -q -n auto $(ARGS)

chaos: $(READY) ## kill the real publisher, service and engines at random times, under load (SGLang among them, and vLLM where it is)
	@tests/sglang/install .venv-sglang
	@REFITD_SGLANG_VENV=.venv-sglang REFITD_VLLM_VENV=$(wildcard .venv-vllm) $(BIN)/python tests/reliability/chaos/main.py $(ARGS)

bench: $(READY) ## measure publishing, loading and the service itself
	@PYTHONPATH=tests $(BIN)/python tests/bench/main.py $(ARGS)

bench-gpu: $(READY) ## measure what else moves weights from a GPU to an engine (ARGS='--engine URL --engine-model DIR')
	@PYTHONPATH=tests/bench:tests $(BIN)/python tests/bench/gpu/main.py --out build/gpu.json $(ARGS)

sglang: $(READY) ## run the contract tests against a real SGLang, on the CPU (1.8 GB the first time; ARGS='-m sglang': every way to end it)
	@tests/sglang/install .venv-sglang
	@REFITD_SGLANG_VENV=.venv-sglang REFITD_AREAL_VENV=$(wildcard .venv-areal) $(BIN)/python -m pytest \
	  -m 'sglang and not thorough' tests/integration/contract tests/integration/plugin tests/e2e $(ARGS)

vllm: $(READY) ## run the contract tests against a real vLLM, on the CPU (3.4 GB the first time; ARGS='-m vllm': more models)
	@tests/vllm/install .venv-vllm
	@REFITD_VLLM_VENV=.venv-vllm REFITD_AREAL_VENV=$(wildcard .venv-areal) $(BIN)/python -m pytest -m 'vllm and not thorough' \
	  tests/integration/contract tests/reliability/crash tests/e2e $(ARGS)

stores: $(READY) ## run the tests on a real S3 server (Ceph's) and on Azurite, as far as they can be installed
	@tests/s3/install
	@tests/azure/install .azurite
	@$(BIN)/python -m pytest -m stores tests/integration/hosts $(ARGS)

core: $(READY) ## build and install the core without its rings, count its lines, and have it update an SGLang and a vLLM
	@tests/core/install .venv-core
	@REFITD_CORE_VENV=.venv-core $(BIN)/python -m pytest -q tests/core $(ARGS)

lowest: $(READY) ## run a service with the lowest versions that pyproject.toml takes
	@tests/lowest/install .venv-lowest
	@REFITD_LOWEST_VENV=.venv-lowest $(BIN)/python -m pytest tests/lowest $(ARGS)

areal: $(READY) ## run the released AReaL's own client against a front (1.7 GB the first time)
	@tests/areal/install .venv-areal
	@REFITD_AREAL_VENV=.venv-areal $(BIN)/python -m pytest tests/e2e -m areal $(ARGS)

trainers: $(READY) ## run the released trainers' own code with refitd in it: verl, and a job of Ray (1.5 GB the first time)
	@tests/trainers/install .venv-trainers
	@REFITD_TRAINERS_VENV=.venv-trainers $(BIN)/python -m pytest tests/e2e -m trainers $(ARGS)

ifeq ($(origin SGLANG_PYTHON),file)
plugin-releases: $(READY) ## run the plugin's tests inside older releases of SGLang as well (minutes each; SGLANG_PYTHON=… on a GPU)
	@tests/sglang/install .venv-sglang
	@for release in $(RELEASES); do \
	  tests/sglang/install-release .venv-sglang .sglang/$$release $$release || exit 1; \
	  echo "SGLang $$release:"; \
	  REFITD_SGLANG_VENV=.venv-sglang REFITD_SGLANG_RELEASE=.sglang/$$release \
	    $(BIN)/python -m pytest tests/integration/plugin -m sglang -q $(ARGS) || exit 1; \
	done
else
plugin-releases: # on a GPU: in the SGLang of SGLANG_PYTHON, and in those of RELEASES that lie in .sglang/RELEASE
	@for folder in '' $(wildcard $(RELEASES:%=.sglang/%)); do \
	  echo "SGLang $${folder:-of $(SGLANG_PYTHON)}:"; \
	  SGLANG_DEVICE=cuda REFITD_SGLANG_VENV=$$($(SGLANG_PYTHON) -c 'import sys; print(sys.prefix)') \
	    REFITD_SGLANG_RELEASE=$$folder PYTHONPATH=client:service:tests$${PYTHONPATH:+:$$PYTHONPATH} \
	    $(SGLANG_PYTHON) -m pytest tests/integration/plugin -m sglang -q -k stock_load_leaves $(ARGS) || exit 1; \
	done
endif

browser: $(READY) ## test the dashboard in a real Chromium, and look with axe for what keeps people out
	@tests/browser/install .venv
	@$(BIN)/python -m pytest tests/browser -q $(ARGS)

screenshots: $(READY) ## take the README's pictures anew, of a stack that really runs
	@tests/browser/install .venv
	@PYTHONPATH=tests $(BIN)/python tests/browser/screenshots.py docs/images

demo-svg: $(READY) ## take the README's terminal session anew, of a demo that really runs
	@$(BIN)/python tests/browser/recorded_demo.py docs/images/demo.svg

docs: $(DOCS) ## build the documentation into build/docs: every warning and every broken link within it is an error
	@$(BIN)/sphinx-build -b html -E -q -W --keep-going docs build/docs && echo "build/docs/index.html"

docs-links: $(DOCS) ## ask every page elsewhere that the documentation links to whether it is there (needs the network)
	@$(BIN)/sphinx-build -b linkcheck -q docs build/docs-links

reference: $(READY) ## write the pages of settings, commands, API and SDK in docs/reference anew, from the code
	@PYTHONPATH=docs $(BIN)/python -m generate

clean: ## remove what these verbs made: environments and caches
	@rm -rf .venv .venv-sglang .venv-vllm .venv-areal .venv-trainers .venv-core .venv-lowest .sglang .promtool .envoy .nginx .azurite .pytest_cache .ruff_cache .hypothesis build dist
	@find client service tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is made last, so that a half-built environment is never taken for a good one.
.venv/.ready: pyproject.toml constraints.txt deploy/make-venv deploy/install-torch
	@echo "setting up .venv, once, in about a minute:"
	@echo "  1/3 a virtual environment"
	@deploy/make-venv .venv
	@echo "  2/3 torch (200 MB)"
	@deploy/install-torch .venv
	@echo "  3/3 refitd and what it needs"
	@$(BIN)/python -m pip install -qq -c constraints.txt -e '.[dev]'
	@touch $@

.venv/.locked: pyproject.toml deploy/make-venv deploy/install-torch deploy/locks/dev.txt deploy/locks/torch.txt
	@echo "setting up .venv from deploy/locks, once, in about a minute:"
	@echo "  1/4 a virtual environment"
	@deploy/make-venv .venv
	@echo "  2/4 what refitd needs"
	@$(BIN)/python -m pip install -qq --require-hashes --no-deps --only-binary :all: -r deploy/locks/dev.txt
	@echo "  3/4 torch (200 MB)"
	@deploy/install-torch .venv
	@echo "  4/4 refitd"
	@$(BIN)/python -m pip install -qq --no-deps --no-build-isolation -e .
	@$(BIN)/python -m pip check
	@touch $@

# The lock has what the documentation needs.
$(DOCS): $(READY)
	@$(if $(LOCKED),,$(BIN)/python -m pip install -qq -c constraints.txt -e '.[docs]')
	@touch $@
