"""The overlay's parts are named in traces where vLLM's own are, and nowhere else."""

from typing import Any

import pytest
import torch
from support.lockstep import LockstepRun
from vllm.v1 import utils
from vllm.v1.readiness.watch import scopes, startup

PARAMS: dict[str, Any] = {"presence_penalty": -0.6, "bad_words": [[0], [1, 2]]}


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, str]]:
    """Every function that may be wrapped, which is restored after the test."""
    listed = [(owner, name) for _, owner, names in scopes._parts() for name in names]
    for owner, name in listed:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(utils, "_PROFILER_FUNC", None)
    for variable in ("VLLM_CUSTOM_SCOPES_FOR_PROFILING", "VLLM_NVTX_SCOPES_FOR_PROFILING"):
        monkeypatch.delenv(variable, raising=False)
    return listed


def test_nothing_is_wrapped_unless_scopes_are_asked_for(parts: list[tuple[Any, str]]) -> None:
    before = [getattr(owner, name) for owner, name in parts]
    startup.start(object())
    assert [getattr(owner, name) for owner, name in parts] == before


@pytest.mark.parametrize("kind", ["CUSTOM", "NVTX"])
def test_each_function_is_wrapped_once(
    kind: str, parts: list[tuple[Any, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [getattr(owner, name) for owner, name in parts]
    monkeypatch.setenv(f"VLLM_{kind}_SCOPES_FOR_PROFILING", "1")
    for _ in range(2):
        startup.start(object())
    wrapped = [getattr(owner, name) for owner, name in parts]
    assert [function.__wrapped__ for function in wrapped] == before


def test_a_trace_of_torch_names_the_parts_of_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CUSTOM_SCOPES_FOR_PROFILING", "1")
    startup.start(object())
    lockstep = LockstepRun()
    lockstep.add([1, 2], max_tokens=20, **PARAMS)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        lockstep.run(5)
    lockstep.finish()
    counts = {event.key: event.count for event in profile.key_averages()}
    for name in ("live batch: begin_sampling", "live batch: observe_sampled", "penalties: apply"):
        assert counts[f"readiness {name}"] == 5, counts
    assert counts["readiness bad-words: apply"] == 5
    assert "readiness seeds: draw" not in counts
