# The course's commands; `make` alone lists them. README.md explains EXTRAS, TORCH and LAB_ARGS.
PYTHON ?= python3
EXTRAS ?=
TORCH ?=
LAB_ARGS ?=
TEST_ARGS ?=
PART ?=
WHEELS ?=

run := .venv/bin/python -m
notebooks := notebooks labs solutions

.DEFAULT_GOAL := help
.PHONY: help install lab labs test test-slow test-all test-gpu measure doctor site bundle hub clean

help:
	@echo "make lab        install what is needed, then open the course in JupyterLab"
	@echo "make test       unit tests, every lesson, lab and solution (on the GPU where there is one)"
	@echo "make test-slow  the tests that take longer;  make test-all: both"
	@echo "make test-gpu   everything on the GPU: tests, notebooks, answers; in parts: PART=1/4 … PART=4/4"
	@echo "make doctor     what this machine can run, and what mends each gap"
	@echo "make measure    on a GPU: run the lessons, save their outputs and figures"
	@echo "make labs       write labs/ from solutions/"
	@echo "make site       the lessons as pages to read, in build/site/"
	@echo "make bundle     a folder of wheels, build/wheels or WHEELS=DIR, for rooms without a network"
	@echo "make hub        on a machine for a class, as root: JupyterHub (workshop/README.md)"
	@echo "make install    create or update .venv only"
	@echo "make clean      remove .venv and caches (your work in work/ stays)"
	@echo "Options: EXTRAS=core|all  TORCH=cpu|cu126|cu130|system  PYTHON=python3.12  LAB_ARGS=--no-browser  WHEELS=DIR"

install:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "There is no $(PYTHON) on this machine."; \
	  echo "Mend: sudo apt-get install -y python3 python3-venv, or name another: make lab PYTHON=/path/to/python3.12"; \
	  exit 1; }
	@$(PYTHON) -I helpers/install.py --extras '$(EXTRAS)' --torch '$(TORCH)' $(add) $(offline) \
	  $(if $(filter command environment,$(firstword $(origin PYTHON))),--this-python)

offline = $(if $(WHEELS),--wheels '$(WHEELS)')

lab: install
	@$(run) helpers lab -- $(LAB_ARGS)

# notebooks are run by nbval, in the kernel of this environment, beside the unit tests
test: install
	$(run) tests.halves $(TEST_ARGS)

test-slow: install
	$(run) tests.halves slow $(TEST_ARGS)

test-all: test test-slow

test-gpu: install
	HELPERS_MODE=gpu $(run) tests.on_gpu $(if $(PART),--part $(PART)) $(TEST_ARGS)

labs: install
	@$(run) helpers labs

measure: install
	@$(run) helpers measure

# the exit status is the doctor's own: 0 when the course can run here
doctor: install
	@$(run) helpers doctor

# what the pages need is no part of EXTRAS=all
site: add := --add site
site: install
	@rm -rf build/site build/doctrees
	@$(run) sphinx -q -W --keep-going -c site -d build/doctrees . build/site
	@echo "Open build/site/index.html, or put that folder on any server."

# WHEELS is here what is written
bundle: offline = --bundle '$(or $(WHEELS),build/wheels)'
bundle: install

hub: add := --add hub
hub: install
	@$(run) jupyterhub -f workshop/jupyterhub_config.py

clean:
	rm -rf .venv .pytest_cache .ruff_cache build *.egg-info
	find helpers tests $(notebooks) -name __pycache__ -type d -prune -exec rm -rf {} +
