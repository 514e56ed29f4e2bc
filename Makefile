# Every target runs an executable that also works without make. `make` without a target prints this list.
SHELL := bash
.DEFAULT_GOAL := help
.PHONY: help demo doctor up down image base smoke rebuild sbom release test test-all test-optional faults bench gpu lint docs reference recordings compose-env lock pins

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## prepare text and train a small model once; in containers, or natively without an engine (DEMO=native|docker)
	@env/demo

doctor: ## check this machine for the containers: engine, Compose, GPUs, driver, folders (ARGS=--json, ARGS=--fast)
	@env/doctor $(ARGS)

up: ## inspect this machine, write .env once, then docker compose up (ARGS=-d: in the background)
	@env/up $(ARGS)

down: ## stop and remove the services; the volume with data and runs is kept
	@docker compose --profile '*' down

image: ## build the image on the base that .env names (make image writes .env if needed, as make up does)
	@env/up --env

base: ## build the stand-in base image, for machines that reach no registry
	@env/base/build

smoke: .venv/dev ## test the image and all three services on a Docker engine; fails if there is none (ARGS=--junitxml=FILE: a report)
	@.venv/bin/python -m pytest tests/containers -m 'containers and not rebuild' $(ARGS)

rebuild: .venv/dev ## build the image twice, the second time without cache, and compare the layers
	@.venv/bin/python -m pytest tests/containers -m rebuild

sbom: ## list all Python packages of the image with licenses and hashes, in sbom.cdx.json (CycloneDX)
	@env/sbom

release: ## build the image with SBOM and provenance, and push it: make release IMAGE=registry/name:tag
	@env/release $(IMAGE)

TESTS = .venv/bin/python -m pytest --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# Folders and files with tests that `make test` leaves out: pytest spends seconds to import all others. These tests often wait, so
# they have a worker more than there are cores.
LONG = tests/browser tests/faults tests/integration $$(grep -rlw --include='test_*.py' 'mark\.long' tests)

# Tests start Python thousands of times. Without files of bytecode each start compiles its modules.
test test-all test-optional: export PYTHONDONTWRITEBYTECODE =

test: .venv/dev ## unit tests and one test of each promise, ten minutes on two cores (ARGS=tests/unit: only some)
	@$(TESTS) -n logical -m 'not containers and not optional and not long' $(ARGS)

test-all: .venv/dev ## the tests that make test leaves out, except those that need an engine or an optional package
	@$(TESTS) -n $$(($$(nproc) + 1)) -m 'not containers and not optional and long' $(or $(ARGS),$(LONG))

test-optional: .venv/dev ## install the optional locks (lm-eval, Ray, wandb, MLflow, openai) into .venv-optional, and run the tests that need them
	@env/test-optional

faults: .venv/dev ## the fault campaigns with their full counts (hours), and their tables in docs/faults.md (ARGS=tests/faults/test_runs.py: only some)
	@.venv/bin/python -m tests.faults $(ARGS)

bench: .venv/dev ## compare with nanoGPT, transformers, datatrove and others on this machine, after env/bench-peers (ARGS=quick: ten minutes)
	@.venv/bin/python -m tests.benchmarks $(ARGS)

gpu: ## tests and benchmarks on a GPU; run env/gpu-bundle first, on a machine with a network (ARGS="tests train", ARGS=--rehearse)
	@env/gpu $(ARGS)

lint: .venv/dev ## style, types, directions of import, shell scripts
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports
	@if command -v shellcheck >/dev/null; then \
		grep -rlIE '^#!.*\bbash' entrypoints env .ci | xargs shellcheck -x -e SC1091; \
	else echo "lint: shellcheck is not installed, so the shell scripts were not checked (Debian: apt-get install shellcheck)"; fi

docs: ## build the pages of docs/ as a site in site/; a broken link is an error
	@python3 -m venv .venv-docs
	@.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r env/requirements-docs.lock
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet

reference: .venv/dev ## write docs/reference/settings.md and commands.md from the code
	@.venv/bin/python -m docs.write_reference

recordings: .venv/dev ## record the terminal session of docs/guide/first-model.md, and write it into the page
	@.venv/bin/python -m docs.record_session

compose-env: .venv/dev ## write the names of all settings into env/settings, so that Compose passes them on
	@.venv/bin/python env/compose_env.py

lock: ## resolve env/requirements*.in again and write all locks
	@python3 -m venv .venv-lock
	@.venv-lock/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r env/requirements-tools.lock
	@.venv-lock/bin/python env/lock.py

pins: ## ask for new digests of the base images and new versions of the image's Debian packages, and write both
	@env/pins

.PHONY: .venv/dev .venv/optional
.venv/dev:
	@env/make-venv .venv dev

.venv/optional:
	@env/make-optional-venv
