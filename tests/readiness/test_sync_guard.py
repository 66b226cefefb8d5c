"""The sync guard, without a GPU; ``tests/gpu/test_sync_guard.py`` has a real device.

Where there is no CUDA, torch has no sync debug mode and warns of nothing. ``wait`` stands in for an
operation of which it warns.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import vllm.logger
from vllm.v1.readiness.engine import switch
from vllm.v1.readiness.watch import startup, sync_guard


class Runner:
    """A model runner, as far as the guard knows it; a step calls its argument."""

    def execute_model(self, work: Callable[[], Any], dummy_run: bool = False) -> Any:
        return work()

    def sample_tokens(self, work: Callable[[], Any]) -> Any:
        return work()


def wait() -> int:
    """Do what torch's mode ``warn`` warns of."""
    warnings.warn("called a synchronizing CUDA operation (at CUDA.cpp:1.)", stacklevel=2)
    return 7


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The modes that torch was set to; the process seems to have CUDA."""
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def set_mode(mode: str) -> None:
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)
        modes.append(mode)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    monkeypatch.setattr(sync_guard, "_reported", set())
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    vllm.logger._print_warning_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # each place once
        monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
        yield modes


@pytest.fixture
def runner(modes: list[str]) -> Runner:
    return Runner()


def started(runner: Runner, word: str, monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setenv(switch.SYNC_GUARD, word)
    startup.start(runner)
    return runner


@pytest.mark.parametrize("word", ["", "off"])
def test_nothing_is_installed_when_it_is_off(
    word: str, runner: Runner, modes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = warnings.showwarning
    assert vars(started(runner, word, monkeypatch)) == {}
    assert (warnings.showwarning, modes) == (before, [])


def test_without_cuda_the_log_says_that_there_is_nothing_to_guard(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert vars(started(runner, "error", monkeypatch)) == {}
    assert "nothing to guard" in caplog.text


@pytest.mark.parametrize("name", ["execute_model", "sample_tokens"])
def test_a_wait_in_a_step_is_raised(
    name: str, runner: Runner, modes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = getattr(started(runner, "error", monkeypatch), name)
    assert modes == ["warn"]

    def planted() -> int:
        return wait()

    assert planted() == 7  # no step
    with pytest.raises(RuntimeError, match=f"^{name} waits for the device") as caught:
        step(planted)
    assert "in planted" in str(caught.value)


def test_each_stack_is_logged_once(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started(runner, "warn", monkeypatch)
    started(runner, "warn", monkeypatch)  # no second report of each

    def detour() -> int:
        return wait()

    for _ in range(3):
        for work in (wait, detour):
            assert runner.sample_tokens(work) == 7
    reports = [text for text in caplog.messages if text.startswith("sample_tokens waits for the")]
    assert len(reports) == 2
    assert "in detour" in reports[1]


def test_the_dummy_steps_of_a_warm_up_are_not_guarded(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert started(runner, "error", monkeypatch).execute_model(wait, dummy_run=True) == 7


def test_a_wait_of_another_thread_is_not_reported(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started(runner, "error", monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        assert runner.sample_tokens(lambda: pool.submit(wait).result()) == 7
    assert "waits for" not in caplog.text


def test_other_warnings_are_shown(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: shown.append(str(message)))
    warnings.simplefilter("always")
    started(runner, "error", monkeypatch).sample_tokens(lambda: warnings.warn("x", stacklevel=1))
    assert shown == ["x"]


@pytest.mark.parametrize("file", ["torch/_inductor/runtime/benchmarking.py", "other.py"])
def test_waits_of_a_compilation_are_not_reported(
    file: str, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(runner, "error", monkeypatch)
    scope: dict[str, Any] = {"wait": wait}
    exec(compile("def trial(): return wait()", f"/site/{file}", "exec"), scope)
    if file == "other.py":
        with pytest.raises(RuntimeError, match="waits for the device"):
            runner.sample_tokens(scope["trial"])
    else:
        assert runner.sample_tokens(scope["trial"]) == 7
