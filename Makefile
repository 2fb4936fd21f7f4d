# The only entry to every task; `make help` explains each. Nothing but Python >= 3.11, make and git is needed to begin.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules --no-print-directory

PYTHON ?= python3# of the machine, and for all environments: `make PYTHON=python3.12 test`
ifeq ($(shell command -v $(PYTHON)),)
$(error $(PYTHON) is not on PATH: install Python 3.11 or newer, or name one with `make PYTHON=...`)
endif
override PYTHON := $(shell command -v $(PYTHON))
ifndef MACHINE_PATH
MACHINE_PATH := $(PATH)# before ours is in front of it, also for a make below this one
endif
export PYTHON MACHINE_PATH
SETUP = cd tests && PATH='$(MACHINE_PATH)' exec $(PYTHON) -m setup
DEV := $(CURDIR)/.build/env/dev/bin
# a tool with libraries that tests have no other use for, beside theirs
BESIDE_DEV = cd tests && VIRTUAL_ENV='$(CURDIR)/.build/env/dev' $(CURDIR)/.build/tools/bin/uv run --quiet --no-project --active --with-requirements
LOCALCLUSTER = $(CURDIR)/.build/bin/localcluster
CLUSTER_DIR := $(CURDIR)/.build/localcluster

# with the build's flags, so that what it compiled is used again
GO := cd tests/localcluster && . ./go-env.sh && go
PACKAGES := $(filter-out %.egg-info,$(wildcard operator/colocated_rl_* operator/cli/colocated_rl_* workloads/*/colocated_rl_*))
SCRIPTS = $(shell git ls-files '*.sh' .ci/run)

export PATH := $(DEV):$(CURDIR)/.build/tools/bin:$(PATH)
unexport PYTHONDONTWRITEBYTECODE PYTHONPATH VIRTUAL_ENV# imports get faster with each run; nothing of the caller's shell
ifneq ($(origin KUBECONFIG),command line)
unexport KUBECONFIG# tests touch a cluster of yours only when it is named
endif

.PHONY: help
help: ## this text
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# --- the two commands, each from a bare machine

.PHONY: demo
demo: setup ## a ColocatedRLJob on a local Kubernetes cluster: real API server, real engines, real training steps
	@$(DEV)/python -m examples.arithmetic.demo

.PHONY: trained-model
trained-model: ## as demo, with a trained public model of 135 million parameters: it learns in minutes on two free cores
	@$(SETUP) --then all,trained-model trained-model-layer

.PHONY: test
test: ## everything below in one go: checks and fast tests first, while the rest is still being made
	@$(SETUP) --then dev fast-layer --then images,peers,frameworks,trained-model contract-layer --then all cluster-layer --then all e2e-layer

.PHONY: test-slow
test-slow: ## what is too slow for test: larger searches, further moments of a kill, further whole jobs; CI runs it with BUT=release
	@$(SETUP) --then all,frameworks,peers,trained-model slow-layer

.PHONY: soak
soak: export COLOCATED_RL_KILLS_S = $(or $(FOR_S),3600)
soak: export COLOCATED_RL_ONLY = $(ONLY)
soak: export COLOCATED_RL_SOAK = $(or $(ENGINES),real)
soak: export COLOCATED_RL_SEED := $(or $(SEED),$(shell date +%s))
soak: ## an hour of drains, lost nodes, upgrades, bad devices, full volumes, kills; FOR_S=600, SEED=7, ENGINES=simulated, ONLY=kills, ONLY=network; no part of test
	@$(SETUP) --then all soak-layer

# --- parts of them

.PHONY: setup
setup: ## environments, the local cluster's binary and images, the demo's model: everything in .build
	@$(SETUP)

.PHONY: setup-dev
setup-dev:
	@$(SETUP) --only dev

.PHONY: test-fast
test-fast: ## lint, types, unit and property tests: no cluster, no engine
	@$(SETUP) --only dev --then dev fast-layer

.PHONY: test-contract
test-contract: ## against the real engine, the real API server, real processes
	@$(SETUP) --only dev --only cluster --only images --then images,peers,frameworks,trained-model contract-layer --then all cluster-layer

.PHONY: e2e
e2e: ## whole jobs on the local cluster; on any other with `make e2e KUBECONFIG=...`
	@$(SETUP) --then all,frameworks,trained-model e2e-layer

.PHONY: test-kubernetes
test-kubernetes: export LOCALCLUSTER_KUBERNETES = $(CURDIR)/.build/kubernetes/$(VERSION)
test-kubernetes: setup ## the tests that need a cluster, and whole jobs, on an older Kubernetes, built from its module: VERSION=1.33; no part of test
	@tests/localcluster/release.sh '$(VERSION)' $(LOCALCLUSTER_KUBERNETES)
	@$(CLUSTER_TESTS) -m 'cluster and not release' --ignore-glob='*/test_localcluster_*'
	@pytest $(TWO_JOBS) -m 'not release' tests/e2e/test_demo.py tests/e2e/test_two_pods.py tests/e2e/test_upgrade.py

.PHONY: e2e-kueue
e2e-kueue: setup ## jobs in a queue of the real Kueue, built from its module in 3 to 10 minutes; no part of test, but of CI
	@tests/kueue/build.sh .build/kueue
	@pytest tests/kueue

.PHONY: e2e-gangs
e2e-gangs: setup ## gangs by the schedulers of scheduler-plugins and Volcano, built from their modules; no part of test
	@tests/gangs/build.sh .build/gangs
	@pytest tests/gangs

.PHONY: e2e-cert-manager
e2e-cert-manager: setup ## an authority that cert-manager's own controller makes and renews, built from its module; no part of test
	@tests/cert_manager/build.sh .build/cert-manager
	@pytest tests/cert_manager

.PHONY: e2e-policies
e2e-policies: setup ## NetworkPolicies that kube-router enforces, built from its module; needs iptables, ipset and root; no part of test
	@tests/policies/build.sh .build/policies
	@pytest tests/policies

.PHONY: e2e-openshift
e2e-openshift: setup ## pods before OpenShift's own admission, built from clones in OPENSHIFT=DIR, and says which; no part of test
	@tests/openshift/build.sh .build/openshift '$(OPENSHIFT)'
	@pytest tests/openshift

.PHONY: e2e-prometheus
e2e-prometheus: setup ## alerts, monitors and dashboard in the real Prometheus, built from its module; no part of test
	@tests/prometheus/build.sh .build/prometheus
	@pytest tests/prometheus

.PHONY: test-images
test-images: ## images built by podman and by BuildKit, and started; needs root, and names what else; no part of test
	@tests/images/prerequisites.sh
	@$(SETUP) --only dev
	@tests/containerd/build.sh .build/containerd
	@tests/images/base-image.sh .build/base-image.tar
	@pytest tests/images

.PHONY: e2e-containerd
e2e-containerd: ## whole jobs in containers of those images, on nodes that run containerd; the same needs; no part of test
	@tests/images/prerequisites.sh
	@$(SETUP)
	@tests/containerd/build.sh .build/containerd
	@tests/images/base-image.sh .build/base-image.tar
	@pytest tests/containerd

.PHONY: test-storage
test-storage: ## whole jobs on volumes that fill up and are expanded, and on a shared one in user space; needs root, and names what else; no part of test
	@tests/storage/prerequisites.sh
	@$(SETUP)
	@pytest tests/storage

.PHONY: test-page
test-page: ## the page of a job in Chromium, from the rollout controller's own process; names what it needs; no part of test
	@tests/page/prerequisites.sh
	@$(SETUP) --only dev
	@$(BESIDE_DEV) page/requirements.txt python -m pytest page

.PHONY: mutants
mutants: setup-dev ## small changes of what changed in the pure core, and which of them no fast test notices; ONLY=plan.py, WITHIN_S=600, AT_ONCE=1; no part of test
	@$(BESIDE_DEV) mutants/requirements.txt python -m mutants $(if $(ONLY),--only $(ONLY)) $(if $(WITHIN_S),--within $(WITHIN_S)) $(if $(AT_ONCE),--at-once $(AT_ONCE))

.PHONY: explore
explore: setup-dev ## every state of a job within BOUNDS="--pods 3 --deaths 1 --of agent", and its number; no part of test
	@PYTHONPATH=tests python -m fakes.explore $(BOUNDS)

.PHONY: fuzz
fuzz: setup-dev ## strangers' bytes against every parser: an hour, divided over all; FUZZ_S=60, SEED=7, TARGETS="journal target"
	@$(BESIDE_DEV) fuzz/requirements.txt python -m fuzz --seconds $(or $(FUZZ_S),3600) --seed $(or $(SEED),0) $(TARGETS)

.PHONY: lint
lint: ## form, likely bugs, who imports whom, shell scripts, Go
	@$(SETUP) --only dev --only cluster --then all lint-layer --then all vet-layer

.PHONY: types
types: ## mypy --strict over everything, tests too
	@$(SETUP) --only dev --then dev types-layer

.PHONY: format
format: setup-dev ## write the form that lint asks for
	@ruff format --config tests/pyproject.toml .
	@ruff check --config tests/pyproject.toml --fix --quiet .

.PHONY: generate
generate: setup-dev ## the CRD, the chart's copy of it, and of docs: fields, command line, metrics, values, OpenAPI
	@python -m colocated_rl_operator.crd
	@python -m colocated_rl_cli.document
	@PYTHONPATH=tests python -m documents

.PHONY: verify
verify: setup-dev ## generated files are as generated, and all of test: what has to hold before a commit lands
	@python -m colocated_rl_operator.crd --check
	@python -m colocated_rl_cli.document --check
	@PYTHONPATH=tests python -m documents --check
	@$(MAKE) test

.PHONY: bench
bench: setup ## figures: time of each rung, what operator and agents add, memory of each process
	@python -m bench

.PHONY: bench-operator
bench-operator: setup ## what the operator adds to a switch, from 8 members to 1,024; groups at once, 500 jobs
	@PYTHONPATH=tests python -m bench.operator

.PHONY: bench-pods
bench-pods: setup ## memory of an operator that has 10,000 pods, of 40 jobs, each with a member that answers
	@PYTHONPATH=tests python -m bench.operator --members --no-groups --jobs 40 --job-size 249

.PHONY: bench-link
bench-link: setup-dev ## what a member costs the operator by its own WebSocket client and by aiohttp's
	@PYTHONPATH=tests python -m bench.link

.PHONY: bench-rollout
bench-rollout: setup-dev ## how long a step takes beside a synchronous loop and a bound, simulated; what resuming costs
	@python -m bench.rollout

.PHONY: bench-rollout-limit
bench-rollout-limit: setup-dev ## samples a second that one rollout controller takes, over 10, 100 and 1,000 engines
	@PYTHONPATH=tests python -m bench.rollout_limit

.PHONY: bench-loss
bench-loss: setup ## how long the group of a job is without a pod that is lost; with SILENT=1, whose node falls silent
	@PYTHONPATH=tests python -m bench.loss --losses $(or $(LOSSES),6) $(if $(SILENT),--silent)

.PHONY: bench-loss-at-size
bench-loss-at-size: setup-dev ## the same for 2 to 1,024 pods: the real plan on a simulated clock
	@PYTHONPATH=tests python -m bench.loss_at_size

.PHONY: bench-gate
bench-gate: setup-dev ## what a gate costs; with ROUTER=PYTHON of an environment that has sglang-router, beside that
	@PYTHONPATH=tests python -m bench.gate $(if $(ROUTER),--router $(ROUTER))

.PHONY: bench-interruption
bench-interruption: setup ## how long the real engine takes to end a job's requests and to be idle, by how it is told
	@PYTHONPATH=tests python -m bench.interruption

.PHONY: bench-trainer
bench-trainer: ## what the trainer's exports, moves and steps cost beside plain copies and beside trl
	@$(SETUP) --only dev --only peers
	@PYTHONPATH=tests python -m bench.trainer

.PHONY: bench-benefit
bench-benefit: setup ## whole jobs whose answers have a long tail, for each staleness, and trl's beside them; TURNS=3
	@PYTHONPATH=tests python -m bench.benefit --turns $(or $(TURNS),3)

.PHONY: bench-gpu
bench-gpu: setup-dev ## what a switch moves on one NVIDIA GPU, beside what the device can do; no part of test
	@python -m bench.gpu

.PHONY: test-gpu
test-gpu: setup-dev ## what must hold on one NVIDIA GPU; no part of test
	@pytest tests/gpu

.PHONY: prove-gpu
prove-gpu: setup-dev ## 50 switches of a pod on one NVIDIA GPU, into docs/measurements.md: MODEL=0.6B, SWITCHES=10; no part of test
	@PYTHONPATH=tests python -m bench.gpu.prove $(if $(MODEL),--model $(MODEL)) $(if $(SWITCHES),--switches $(SWITCHES))

.PHONY: gpu-kit
gpu-kit: setup-dev ## what these three need on a machine without a network, in .build/gpu-kit, pieces of at most 60 MiB: THERE=3.12 is its Python
	@python -m bench.gpu.kit $(if $(THERE),--python $(THERE))

.PHONY: lock
lock: ## resolve the pinned requirement files anew
	@$(SETUP) --lock

.PHONY: audit
audit: setup-dev ## pinned libraries with a known vulnerability, by pip-audit and PyPI's database, or a checkout of pypa/advisory-database: ADVISORIES=DIRECTORY; no part of test
	@$(if $(ADVISORIES),PYTHONPATH=tests python -m audit $(ADVISORIES),tests/audit.sh .build/tools/bin/uv) operator/requirements.txt workloads/*/requirements.txt

# --- what is given away

.PHONY: images
images: ## container images of the last commit, with docker, podman or nerdctl; IMAGES="operator agent" for some of them
	@BUILDER='$(BUILDER)' REPOSITORY='$(REPOSITORY)' TAG='$(TAG)' SOURCE='$(SOURCE)' BUILD_ARGS='$(BUILD_ARGS)' workloads/images/build.sh $(IMAGES)

.PHONY: dist
dist: ## what a release has beside images, in .build/dist: wheels, chart, manifests, SBOMs, hashes, provenance; BUILDER_ID=URI
	@$(SETUP) --only images --only cluster
	@tests/release/dist.sh .build/tools/bin/uv $(LOCALCLUSTER) .build/dist $(or $(BUILDER_ID),https://rl.colocate.dev/by-hand)

RELEASE = PYTHONPATH=tests .build/tools/bin/uv run --quiet --no-project --with-requirements tests/release/requirements.txt python -m release

.PHONY: sign
sign: ## the provenance of .build/dist, with the private key KEY=FILE (PEM: Ed25519, ECDSA, RSA): needs no network
	@$(RELEASE) sign .build/dist --key '$(KEY)'

.PHONY: verify-dist
verify-dist: ## that .build/dist is what was signed: KEY=FILE is the public key
	@$(RELEASE) verify .build/dist --key '$(KEY)'

.PHONY: docs
docs: setup-dev ## the pages of docs/ as a site in .build/site, every link checked
	@.build/tools/bin/uv run --quiet --no-project --with-requirements tests/website/requirements.txt \
	  mkdocs build --strict --config-file tests/website/mkdocs.yml
	@echo ".build/site/index.html"

.PHONY: bundle
bundle: ## the chart as plain manifests for kubectl apply, in .build/colocated-rl.yaml
	@$(SETUP) --only cluster
	@charts/bundle.sh $(LOCALCLUSTER) helm >.build/colocated-rl.yaml
	@echo ".build/colocated-rl.yaml: kubectl apply -f installs it"

# --- the local cluster by hand

.PHONY: cluster-up
cluster-up: setup ## start a local cluster and leave it running
	@$(LOCALCLUSTER) up --detach --dir $(CLUSTER_DIR) --images .build/images.yaml

.PHONY: cluster-status
cluster-status: ## what it runs, and how to reach it
	@$(LOCALCLUSTER) status --dir $(CLUSTER_DIR)

.PHONY: cluster-down
cluster-down: ## end it: no process, mount, port or kernel setting stays
	@[ ! -x $(LOCALCLUSTER) ] || $(LOCALCLUSTER) down --dir $(CLUSTER_DIR)

.PHONY: clean
clean: cluster-down ## remove all that was built; downloads stay in the caches of uv and Go
	@rm -rf .build

# --- the layers of `make test`, when what they need is there

.PHONY: fast-layer
fast-layer:
	@$(MAKE) -j2 lint-layer types-layer unit-layer

.PHONY: unit-layer
unit-layer:
	@pytest --numprocesses=2 --dist=loadfile tests/unit

BY_FILE = --dist=loadfile --no-loadscope-reorder# in the order of tests/conftest.py

.PHONY: contract-layer
contract-layer:
	@pytest --numprocesses=3 $(BY_FILE) -m 'not cluster and not slow' tests/contract tests/integration # while an engine starts, two cores have room for a third

CLUSTER_TESTS = pytest --numprocesses=2 $(BY_FILE) tests/integration tests/contract

.PHONY: cluster-layer
cluster-layer: vet-layer
	@$(GO) test -vet=off ./... # vet-layer has done that
	@$(CLUSTER_TESTS) -m 'cluster and not slow'

TWO_JOBS = $(if $(KUBECONFIG),,--numprocesses=2 $(BY_FILE)) # each on a cluster of its own: one loads libraries while another computes

.PHONY: e2e-layer
e2e-layer:
	@pytest $(TWO_JOBS) -m 'not slow' tests/e2e

SLOW = slow$(if $(BUT), and not $(BUT))

.PHONY: slow-layer
slow-layer:
	@pytest --numprocesses=2 $(BY_FILE) -m '$(SLOW)' tests/contract tests/integration
	@pytest $(TWO_JOBS) -m '$(SLOW)' tests/e2e

.PHONY: soak-layer
soak-layer:
	@pytest $(if $(ONLY),tests/e2e/test_kills.py,tests/e2e/test_soak.py)

.PHONY: trained-model-layer
trained-model-layer:
	@python -m examples.trained_model.demo

.PHONY: lint-layer
lint-layer:
	@ruff format --config tests/pyproject.toml --check --quiet . || { echo "make format: writes this form"; exit 1; }
	@ruff check --config tests/pyproject.toml --quiet .
	@lint-imports --config tests/pyproject.toml --cache-dir .build/cache/imports --no-logo
	@shellcheck $(SCRIPTS)

.PHONY: vet-layer
vet-layer: # needs the modules that the cluster's build has fetched
	@$(GO) vet ./...
	@unformatted=$$("$$($(GO) env GOROOT)/bin/gofmt" -l tests/localcluster tests/openshift); [ -z "$$unformatted" ] || { echo "gofmt -w $$unformatted"; exit 1; }

.PHONY: types-layer
types-layer:
	@mypy --config-file tests/pyproject.toml $(PACKAGES) tests examples bench workloads/images
