# vllm-readiness-overlay. `make help` lists the targets.
#
# Targets work on the installation that VENV=dir, SITE=dir or PYTHON=interpreter names; else on
# the active environment, virtual or conda's (except its base); else on .venv here, which
# `make apply` makes.

TEST_ENV := build/env
# The installation to measure if none is named: without a GPU, the tests' own vLLM.
BENCH_ENV := $(if $(wildcard /dev/nvidiactl /dev/dxg),build/pristine,$(TEST_ENV))
# Each file of tests runs in one worker. Tests of engines wait for processes, so that one worker
# more than there are cores is faster; beyond four, the longest file decides.
WORKERS ?= $(shell n=$$(nproc) && echo $$((n < 4 ? n + 1 : 4)))
# Each worker imports vLLM: let the first one leave its bytecode to the others.
PYTEST = PYTHONDONTWRITEBYTECODE= $(TEST_ENV)/bin/python -m pytest
BY_FILE = -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# An empty value on the command line is a mistake; in the environment it means nothing.
EMPTY := VENV SITE PYTHON WHEEL MODEL FILE EXTRA PATCH RELEASE SHA256 LEAVE
$(foreach name,$(EMPTY),$(if $(value $(name)),,$(if $(filter command%,$(origin $(name))),\
  $(error $(name)= is empty: give it a value, or leave it out))))
# An interpreter that the environment names does not contradict a target on the command line.
ifneq (,$(filter environment%,$(origin PYTHON)))
  ifneq (,$(value VENV)$(filter command%,$(origin SITE)))
    override PYTHON :=
  endif
endif
# Errors about a target name the environment variable that it came from.
export READINESS_NAMED_BY := $(strip $(foreach name,VENV SITE PYTHON,$(if $(value $(name)),\
  $(if $(filter environment%,$(origin $(name))),$(name)))))
# What of the overlay to lay is named on the command line alone: these names are anybody's.
CHOSEN := $(foreach name,LEAVE EXTRA,$(if $(filter command%,$(origin $(name))),$(name)))
# Values are taken literally, and passed through the environment, so that a path may hold any
# character. The shell splits ARGS.
NAMED := VENV SITE PYTHON WHEEL FORCE MODEL FILE EXTRA PATCH RELEASE SHA256 TRY LEAVE
$(foreach name,$(NAMED) PYTHON3 ARGS,$(if $(value $(name)),$(eval override $(name) := $$(value $(name)))))
override PYTHON3 := $(or $(PYTHON3),python3)
export $(NAMED) PYTHON3
CONDA := $(if $(filter base,$(value CONDA_DEFAULT_ENV)),,$(value CONDA_PREFIX))
OWN_ENV :=
ifeq ($(strip $(VENV)$(SITE)$(PYTHON)$(value VIRTUAL_ENV)$(CONDA)),)
  override VENV := .venv
  OWN_ENV := yes
endif
# A dry run makes no environment, also if the flag is abbreviated.
DRY := $(if $(findstring --d,$(ARGS)),--dry-run)

PY3 = "$$PYTHON3"
TARGET = $(if $(VENV),--venv="$$VENV") $(if $(SITE),--site="$$SITE") $(if $(PYTHON),--python="$$PYTHON")
CHOICE = $(if $(filter LEAVE,$(CHOSEN)),--leave="$$LEAVE") $(if $(filter EXTRA,$(CHOSEN)),--extra="$$EXTRA")
BENCH_TARGET = $(if $(OWN_ENV),--venv $(BENCH_ENV),$(TARGET))
# Our programs are packages in scripts/, and do not import from the directory that they are run in.
# environment.children takes these variables away again from whatever they start.
SAFE = PYTHONSAFEPATH="$${PYTHONSAFEPATH:-make}"
PACKAGES = env $(SAFE) PYTHONPATH="scripts$${PYTHONPATH:+:$$PYTHONPATH}"
OVERLAY = $(PACKAGES) $(PY3) -m overlay
# The same where `make apply` is to be advised if it makes or completes .venv.
OWN_STATE = $(if $(wildcard .venv),$(if $(wildcard .venv/readiness-overlay.complete),other,$(if \
  $(wildcard .venv/readiness-overlay.made),incomplete,other)),incomplete)
ADVISING = $(PACKAGES) $(if $(OWN_ENV),READINESS_OWN_ENV=$(OWN_STATE)) $(PY3) -m overlay
SERIES = $(PACKAGES) $(PY3) -m series
ENVIRONMENT = $(PACKAGES) $(PY3) -m environment
TOOLS = $(PACKAGES) $(TEST_ENV)/bin/python -m
DEMO_PYTHON = $(if $(PYTHON),"$$PYTHON",$(if $(VENV),"$$VENV/bin/python",$(if $(SITE),$(PY3),"$${VIRTUAL_ENV:-$$CONDA_PREFIX}/bin/python")))
# Upstream's files where no installation is named: ours, or the tests' own vLLM; neither if it was
# made with another release than the pinned one.
PINNED = $(shell sed -n 's/^vllm = //p' VERSION_PIN)
MADE = $(shell sed -n 1p $(1)/readiness-overlay.made 2>/dev/null)
FITS = $(if $(wildcard $(1)/lib/python3*/site-packages/vllm),$(if $(call MADE,$(1)),$(filter %==$(PINNED),$(call MADE,$(1))),yes))
HELD = $(firstword $(foreach each,.venv $(TEST_ENV),$(if $(call FITS,$(each)),$(each))))
REVIEW_BASE = $(if $(OWN_ENV),--venv $(or $(HELD),$(TEST_ENV)),$(TARGET))
REVIEW = $(TOOLS) review
UPSTREAM = $(if $(WHEEL),--wheel="$$WHEEL",$(TARGET))
# Makes .venv first if no target is named.
IN_OWN = $(if $(OWN_ENV),$(ENVIRONMENT) serve $(DRY) .venv -- )

.DEFAULT_GOAL := help
.PHONY: help apply revert status verify doctor diff review rebase vendor edit refresh dist demo bench-traffic bench-serving conformance probe test test-slow lint tools test-environment bench-environment

help: ## list the targets
	@echo "The target: VENV=dir, SITE=site-packages dir, PYTHON=interpreter, the active virtual"
	@echo "or conda environment, or .venv here. More flags: ARGS='--json --dry-run'."
	@echo
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; \
	  do printf '  %-13s %s\n' "$$name" "$$text"; done

apply: ## lay the overlay over the target (LEAVE=file: all but what changes it; EXTRA=dir)
	@$(IN_OWN)$(OVERLAY) apply $(TARGET) $(CHOICE) $(ARGS)

revert: ## restore upstream's files, byte for byte
	@$(ADVISING) revert $(TARGET) $(ARGS)

status: ## show the state of the installation
	@$(ADVISING) status $(TARGET) $(CHOICE) $(ARGS)

verify: ## succeed silently if the overlay is whole
	@$(ADVISING) verify $(TARGET) $(CHOICE) $(ARGS)

doctor: ## say what is installed there, who uses it, and what apply would do
	@$(ADVISING) doctor $(TARGET) $(CHOICE) $(ARGS)

# Without upstream's files it shows the patches alone, rather than make an environment.
diff: ## show what the overlay changes, in context
ifeq ($(OWN_ENV)$(HELD),yes)
	@$(if $(ARGS),echo "diff: no vLLM is named; ARGS needs one: VENV=dir" >&2; exit 2)
	@cat $$(sed 's|^|patches/|' patches/series) || [ $$? -gt 128 ]  # a closed pipe is no error
	@echo "diff: no vLLM is named, so these are the patches alone; VENV=dir shows them in context" >&2
else
	@$(OVERLAY) diff $(REVIEW_BASE) $(CHOICE) $(ARGS)
endif

review: tools ## review RELEASE=version or wheel or latest (TRY=0: do not try it)
	@$(REVIEW) release "$$RELEASE" $(if $(SHA256),--sha256 "$$SHA256") $(if $(filter 0,$(TRY)),--no-try) $(REVIEW_BASE) $(ARGS)

rebase: tools ## lay out the series on RELEASE=version or wheel in build/edit
	@# 11: git has stopped at a conflict, as in any rebase, and what comes next was said.
	@$(REVIEW) rebase "$$RELEASE" $(if $(SHA256),--sha256 "$$SHA256") $(REVIEW_BASE) $(ARGS) \
	  || { code=$$?; [ $$code -eq 11 ] || exit $$code; }

vendor: ## build the vendored copies into vendor_overlay/ (or from WHEEL=file)
	@$(SERIES) vendor $(UPSTREAM) $(ARGS)

edit: ## lay out the series as commits in build/edit (PATCH=name: and begin a new patch)
	@$(SERIES) edit $(UPSTREAM) $(if $(PATCH),--patch="$$PATCH") $(ARGS)

refresh: ## write patches/ and VERSION_PIN from build/edit
	@$(SERIES) refresh $(ARGS)

dist: ## build the reproducible archive and wheel of HEAD; print their SHA-256 and digest
	@$(SERIES) dist $(UPSTREAM) $(ARGS)

demo: apply ## serve a small generated model on the overlaid engine and print tokens
	@$(if $(DRY),: )env $(SAFE) PYTHONPATH="scripts$(if $(SITE),:$$SITE,$${PYTHONPATH:+:$$PYTHONPATH})" $(DEMO_PYTHON) -m demo

tools: ## make the environment of tests and pages (build/env, 5.8 GB)
	@$(ENVIRONMENT) test --no-programs $(TEST_ENV)

test-environment:
	@$(ENVIRONMENT) test $(TEST_ENV)

bench-traffic: bench-environment ## compare pristine, overlaid and MRV2 under closed-loop traffic
	@$(TOOLS) bench.traffic $(BENCH_TARGET) $(ARGS)

bench-serving: bench-environment ## compare pristine and overlaid as servers, under streams of chat completions
	@$(TOOLS) bench.serving $(BENCH_TARGET) $(if $(MODEL),--model "$$MODEL") $(ARGS)

conformance: bench-environment ## run upstream's own tests on pristine and overlaid copies of the target
	@$(TOOLS) conformance $(BENCH_TARGET) $(ARGS)

bench-environment: tools
	@$(if $(OWN_ENV),$(if $(filter-out $(TEST_ENV),$(BENCH_ENV)),$(ENVIRONMENT) serve $(BENCH_ENV)))

probe: ## show the parts of a step and who waits, from FILE: a server's http://HOST:PORT/metrics, or a file of the probe
	@$(PACKAGES) $(PY3) -m probe "$$FILE" $(ARGS)

test: test-environment lint ## run the tests, in an environment that it makes (build/env)
	@$(PYTEST) $(BY_FILE) $(ARGS)

test-slow: test-environment ## run the tests that take minutes each
	@READINESS_EXAMPLES=1 $(PYTEST) -m "slow or drawn" $(BY_FILE) $(ARGS)

lint: tools ## ruff and mypy
	@$(TEST_ENV)/bin/ruff check . && $(TEST_ENV)/bin/ruff format --check .
	@$(TEST_ENV)/bin/mypy
