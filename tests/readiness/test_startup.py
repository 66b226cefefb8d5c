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
    match = re.search("features: (.*); fixes: (.*); runner: ", line)
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
    first, idle, elsewhere = lines(kind, caplog_vllm)
    assert first.endswith("; runner: V2 on CPU")
    assert listed(first) == [registry.ON_V2 & group for group in registry.GROUPS.values()]
    assert "Set VLLM_USE_V2_MODEL_RUNNER=0 to use V1" in idle
    names = set(idle.partition("under Model Runner V2: ")[2].partition(". ")[0].split(", "))
    assert names == registry.ALL - registry.ON_V2 - on_gpus(elsewhere)


def test_nothing_idle_is_named_where_nothing_is(
    monkeypatch: pytest.MonkeyPatch, caplog_vllm: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(switch.NAME, "sampler-copies,sessions")
    (line,) = lines(modules.pristine(V2).GPUModelRunner, caplog_vllm)
    assert listed(line) == [{"sampler-copies"}, {"sessions"}]


def test_model_runner_v1_claims_all_that_acts_on_the_device(
    caplog_vllm: pytest.LogCaptureFixture,
) -> None:
    first, elsewhere = lines(modules.pristine(modules.RUNNER).GPUModelRunner, caplog_vllm)
    idle = on_gpus(elsewhere)
    assert listed(first) == [group - idle for group in registry.GROUPS.values()]
    assert first.endswith("; runner: V1 on CPU")


def on_gpus(line: str) -> set[str]:
    """The words without effect on a CPU, which are those that a line lists."""
    idle = {word for word in registry.WORDS.values() if word.device == "gpu"}
    assert "seeds" in idle
    assert set(line.partition("no effect on this device: ")[2].split(", ")) == idle
    return set(idle)
