"""The lines that an engine logs when it starts: what acts under the runner that serves."""

import logging
import re
from typing import Any

import pytest
import vllm.logger
from support import modules
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch
from vllm.v1.readiness.watch import startup

V2 = "vllm/v1/worker/gpu/model_runner.py"


def lines(kind: type, caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines that a runner of a class logs about what acts; it need not be constructed."""
    vllm.logger._print_info_once.cache_clear()
    caplog.set_level(logging.INFO, startup.logger.name)
    startup.start(object.__new__(kind))
    return [line for line in caplog.messages if "; fixes: " in line or "no effect" in line]


def listed(line: str) -> list[set[str]]:
    """The features and the fixes that the first line lists."""
    match = re.search("features: (.*); fixes: (.*)", line)
    assert match is not None
    return [set(names.split(", ")) - {"none"} for names in match.groups()]


@pytest.mark.parametrize("derived", [False, True])
@pytest.mark.parametrize("load", [modules.pristine, modules.overlaid])
def test_model_runner_v2_claims_what_acts_there(
    load: Any, derived: bool, caplog_vllm: pytest.LogCaptureFixture
) -> None:
    kind = load(V2).GPUModelRunner
    if derived:
        kind = type("Own", (kind,), {"__module__": "other_project.runner"})
    first, idle = lines(kind, caplog_vllm)
    assert listed(first) == [registry.ON_V2 & group for group in registry.GROUPS.values()]
    assert "Set VLLM_USE_V2_MODEL_RUNNER=0 to use V1" in idle
    names = set(idle.partition("under Model Runner V2: ")[2].partition(". ")[0].split(", "))
    assert names == registry.ALL - registry.ON_V2


def test_nothing_idle_is_named_where_nothing_is(
    monkeypatch: pytest.MonkeyPatch, caplog_vllm: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(switch.NAME, "sampler-copies,sessions")
    (line,) = lines(modules.pristine(V2).GPUModelRunner, caplog_vllm)
    assert listed(line) == [{"sampler-copies"}, {"sessions"}]


def test_model_runner_v1_claims_all_that_is_on(caplog_vllm: pytest.LogCaptureFixture) -> None:
    (line,) = lines(modules.pristine(modules.RUNNER).GPUModelRunner, caplog_vllm)
    assert listed(line) == [set(registry.FEATURES), set(registry.FIXES)]
