# make quickstart    every stage on a real model, half an hour to an hour and a half on two cores, no GPU
# make test          the fast tests         make test-slow   the rest (minutes)
# make lint          ruff and mypy          make testbed     where objectives can be told apart (half an hour)
# make test-slurm    a real SLURM cluster on this machine, through Debian's packages (minutes; asks for root to install)
#
# TORCH=cpu (default) takes CPU wheels. On a GPU machine: make quickstart TORCH=cuda   (PyPI's wheels)
#                                     or: make quickstart TORCH_INDEX=https://download.pytorch.org/whl/cu130

SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
TORCH ?= cpu
TORCH_VERSION ?= 2.13.0
TORCH_INDEX ?=
CPU_INDEX := https://download.pytorch.org/whl/cpu
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n > 4 ? 4 : n)))

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
STAMP := $(VENV)/.installed-$(TORCH)-$(TORCH_VERSION)
SPECULATORS := $(abspath $(VENV))/speculators-0.9.0

.PHONY: quickstart test test-slow test-slurm lint testbed install clean
.DEFAULT_GOAL := quickstart

quickstart: $(STAMP)
	$(BIN)/exittrain models fetch smollm2-135m
	$(BIN)/exittrain run recipes/quickstart.yaml
	@echo "report: $(CURDIR)/runs/quickstart/report/index.html"

testbed: $(STAMP)
	$(BIN)/exittrain run recipes/testbed.yaml
	@echo "report: $(CURDIR)/runs/testbed/report/index.html"

test: $(STAMP) $(SPECULATORS)
	OMP_NUM_THREADS=1 EXITTRAIN_SPECULATORS="$$(ls -d $(SPECULATORS) 2>/dev/null)" $(BIN)/python -m pytest -q -n $(WORKERS) $(PYTEST_ARGS)

test-slow: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow $(PYTEST_ARGS)

test-slurm: $(STAMP)
	@PATH="$$PATH:/usr/sbin:/sbin"; \
	if ! { command -v slurmctld && command -v slurmd && command -v munged; } >/dev/null; then \
		command -v apt-get >/dev/null || { \
			echo "install SLURM (slurmctld, slurmd) and munge first; no other test needs them"; exit 2; }; \
		root=; test "$$(id -u)" = 0 || root=sudo; \
		$$root apt-get update -qq && $$root env DEBIAN_FRONTEND=noninteractive \
			apt-get install -y -qq --no-install-recommends slurm-wlm munge >/dev/null; \
	fi
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slurm tests/slurm $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/python -m pytest -q tests/test_quality.py

install: $(STAMP)

# vLLM's own reader of heads, without its dependencies and apart from ours; where it cannot be had its test is skipped.
$(SPECULATORS): | $(STAMP)
	@rm -rf $@.part; $(PIP) --no-deps --target $@.part speculators==0.9.0 && mv $@.part $@ \
		|| echo "speculators 0.9.0 could not be installed: the test that asks it will be skipped"

# The stamp is made last: an interrupted installation is simply continued.
$(STAMP): pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "exittrain needs Python 3.10 or newer: make PYTHON=python3.12"; exit 2; }
	@test -x $(BIN)/python && $(BIN)/python -m pip --version >/dev/null 2>&1 || { \
		rm -rf $(VENV); \
		$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { rm -rf $(VENV); \
			echo "$(PYTHON) cannot make virtual environments: install its venv module (Debian: apt install python3-venv)"; \
			exit 2; }; }
	@echo "installing into $(VENV) (a few minutes the first time)"
	@index="$(TORCH_INDEX)"; \
	if [ -z "$$index" ] && [ "$(TORCH)" = cpu ] && $(BIN)/python -c \
		'import urllib.request as r; r.urlopen("$(CPU_INDEX)/torch/", timeout=5)' >/dev/null 2>&1; \
	then index=$(CPU_INDEX); fi; \
	$(PIP) "torch==$(TORCH_VERSION)" $${index:+--extra-index-url $$index}
	@$(PIP) --editable '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
