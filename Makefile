# vllm-readiness-overlay. `make help` lists the targets.
#
# The installation that a target is about: VENV=dir, SITE=dir, PYTHON=interpreter, or the
# active environment, a virtual one or conda's (but its base); with none of them, .venv here,
# which `make apply` makes.

TEST_ENV := build/env
# What is measured if nothing is named: without a GPU, the tests' own vLLM.
BENCH_ENV := $(if $(wildcard /dev/nvidiactl /dev/dxg),build/pristine,$(TEST_ENV))
# Files of tests run side by side, each in one worker; beyond four, the longest file decides.
WORKERS ?= $(shell n=$$(nproc) && echo $$((n < 4 ? n : 4)))

# What is named and empty is a mistake; in the environment it is as good as not there.
$(foreach name,VENV SITE PYTHON WHEEL MODEL,$(if $(value $(name)),,$(if $(filter command%,$(origin $(name))),\
  $(error $(name)= is empty: give it a value, or leave it out))))
# An interpreter that the environment happens to name does not contradict a named target.
ifneq (,$(filter environment%,$(origin PYTHON)))
  ifneq (,$(value VENV)$(filter command%,$(origin SITE)))
    override PYTHON :=
  endif
endif
# Errors about a target say so if it was the environment that named it.
export READINESS_NAMED_BY := $(strip $(foreach name,VENV SITE PYTHON,$(if $(value $(name)),\
  $(if $(filter environment%,$(origin $(name))),$(name)))))
# Values are taken as they stand, dollars and all, and travel through the environment, so that
# a path may hold whatever it likes. ARGS is for the shell to split.
NAMED := VENV SITE PYTHON WHEEL FORCE MODEL FILE RELEASE SHA256
$(foreach name,$(NAMED) PYTHON3 ARGS,$(if $(value $(name)),$(eval override $(name) := $$(value $(name)))))
override PYTHON3 := $(or $(PYTHON3),python3)
export $(NAMED) PYTHON3
CONDA := $(if $(filter base,$(value CONDA_DEFAULT_ENV)),,$(value CONDA_PREFIX))
OWN_ENV :=
ifeq ($(strip $(VENV)$(SITE)$(PYTHON)$(value VIRTUAL_ENV)$(CONDA)),)
  override VENV := .venv
  OWN_ENV := yes
endif
# A dry run makes no environment, however much of the flag is written.
DRY := $(if $(findstring --d,$(ARGS)),--dry-run)

PY3 = "$$PYTHON3"
TARGET = $(if $(VENV),--venv="$$VENV") $(if $(SITE),--site="$$SITE") $(if $(PYTHON),--python="$$PYTHON")
BENCH_TARGET = $(if $(OWN_ENV),--venv $(BENCH_ENV),$(TARGET))
OVERLAY = $(PY3) scripts/overlay
DEMO_PYTHON = $(if $(PYTHON),"$$PYTHON",$(if $(VENV),"$$VENV/bin/python",$(if $(SITE),$(PY3),"$${VIRTUAL_ENV:-$$CONDA_PREFIX}/bin/python")))
# Upstream's files where no installation is named: ours, or the tests' own vLLM.
HELD = $(firstword $(foreach each,.venv $(TEST_ENV),$(if $(wildcard $(each)/lib/python3*/site-packages/vllm),$(each))))
REVIEW_BASE = $(if $(OWN_ENV),--venv $(or $(HELD),$(TEST_ENV)),$(TARGET))
REVIEW = $(TEST_ENV)/bin/python scripts/review
UPSTREAM = $(if $(WHEEL),--wheel="$$WHEEL",$(TARGET))
# Runs what follows in .venv, which it makes, if nothing is named.
IN_OWN = $(if $(OWN_ENV),$(PY3) scripts/environment serve $(DRY) .venv -- )

.DEFAULT_GOAL := help
.PHONY: help apply revert status verify diff review rebase vendor edit refresh dist demo bench bench-serving conformance probe test test-slow lint tools test-environment

help: ## list the targets
	@echo "The target: VENV=dir, SITE=site-packages dir, PYTHON=interpreter, the active virtual"
	@echo "or conda environment, or .venv here. More flags: ARGS='--json --dry-run'."
	@echo
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; \
	  do printf '  %-13s %s\n' "$$name" "$$text"; done

apply: ## lay the overlay over the target (makes .venv if none is named)
	@$(IN_OWN)$(OVERLAY) apply $(TARGET) $(ARGS)

revert: ## give back upstream's files, byte for byte
	@$(OVERLAY) revert $(TARGET) $(ARGS)

status: ## say what state the installation is in
	@$(OVERLAY) status $(TARGET) $(ARGS)

verify: ## succeed, and silently, only if the overlay is whole
	@$(OVERLAY) verify $(TARGET) $(ARGS)

# Nothing is built to show it: without upstream's files there are the patches alone.
diff: ## show what the overlay changes, in context (after `make tools`, as a page, too)
ifeq ($(OWN_ENV)$(HELD),yes)
	@$(if $(ARGS),echo "diff: no vLLM is named; ARGS needs one: VENV=dir" >&2; exit 2)
	@cat $$(sed 's|^|patches/|' patches/series) || [ $$? -gt 128 ]  # the reader has seen enough
	@echo "diff: no vLLM is named, so these are the patches alone; VENV=dir shows them in context" >&2
else
	@$(OVERLAY) diff $(REVIEW_BASE) $(ARGS)
endif
	@$(if $(DRY)$(if $(wildcard pyproject.toml),,archive),,$(if $(wildcard $(TEST_ENV)/readiness-overlay.complete),$(REVIEW) diff $(REVIEW_BASE) >&2,echo "diff: for the page: \`make tools\` (5.8 GB in $(TEST_ENV)), and then \`make diff\` again" >&2))

review: tools ## say what RELEASE=version or wheel means for the overlay, as a page
	@$(REVIEW) release "$$RELEASE" $(if $(SHA256),--sha256 "$$SHA256") $(REVIEW_BASE) $(ARGS)

rebase: tools ## lay out the series on RELEASE=version or wheel in build/edit
	@$(REVIEW) rebase "$$RELEASE" $(if $(SHA256),--sha256 "$$SHA256") $(REVIEW_BASE) $(ARGS)

vendor: ## build the vendored copies into vendor_overlay/ (or from WHEEL=file)
	@$(OVERLAY) vendor $(UPSTREAM) $(ARGS)

edit: ## lay out the series as commits in build/edit
	@$(OVERLAY) edit $(UPSTREAM) $(ARGS)

refresh: ## write patches/ and VERSION_PIN from build/edit
	@$(OVERLAY) refresh $(ARGS)

dist: ## build the reproducible archive of HEAD in build/dist
	@$(OVERLAY) dist $(UPSTREAM) $(ARGS)

demo: apply ## serve a small generated model on the overlaid engine and print tokens
	@$(if $(DRY),: )$(if $(SITE),PYTHONPATH="$$SITE" )$(DEMO_PYTHON) scripts/demo

tools: ## make the environment of tests and pages (build/env, 5.8 GB)
	@$(PY3) scripts/environment test --no-browser $(TEST_ENV)

test-environment:
	@$(PY3) scripts/environment test $(TEST_ENV)

bench: tools ## compare pristine, overlaid and MRV2 (MODEL=dir for real weights)
	@$(if $(OWN_ENV),$(if $(filter-out $(TEST_ENV),$(BENCH_ENV)),$(PY3) scripts/environment serve $(BENCH_ENV)))
	@$(TEST_ENV)/bin/python scripts/bench/engine.py $(BENCH_TARGET) $(if $(MODEL),--model "$$MODEL") $(ARGS)

bench-serving: tools ## compare pristine and overlaid as servers, by vLLM's own bench serve
	@$(if $(OWN_ENV),$(if $(filter-out $(TEST_ENV),$(BENCH_ENV)),$(PY3) scripts/environment serve $(BENCH_ENV)))
	@$(TEST_ENV)/bin/python scripts/bench/serving.py $(BENCH_TARGET) $(if $(MODEL),--model "$$MODEL") $(ARGS)

probe: ## show what the probe recorded in FILE=what VLLM_READINESS_PROBE held
	@$(PY3) scripts/probe "$$FILE" $(ARGS)

test: test-environment lint ## run every test, in a shared environment that it makes (build/env)
	@$(TEST_ENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: test-environment ## run the tests that take minutes each
	@$(TEST_ENV)/bin/python -m pytest -m slow -n $(WORKERS) $(ARGS)

lint: tools ## ruff and mypy
	@$(TEST_ENV)/bin/ruff check . && $(TEST_ENV)/bin/ruff format --check .
	@$(TEST_ENV)/bin/mypy

conformance: tools ## run upstream's own tests on pristine and overlaid copies of the target
	@$(if $(OWN_ENV),$(if $(filter-out $(TEST_ENV),$(BENCH_ENV)),$(PY3) scripts/environment serve $(BENCH_ENV)))
	@PYTHONPATH=scripts $(TEST_ENV)/bin/python -m conformance $(BENCH_TARGET) $(ARGS)
