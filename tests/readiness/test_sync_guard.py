"""The sync guard, without a GPU; ``tests/gpu/test_sync_guard.py`` has a real device."""

import pickle
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from readiness.guard import DEFAULT, ERROR, WARN, Guard, Runner
from torch._dynamo.callback import CallbackTrigger, callback_handler
from vllm.v1.readiness.engine import switch
from vllm.v1.readiness.watch import startup, sync_guard
from vllm.v1.readiness.watch.sync_guard import FUNCTIONS, DeviceSyncError


def watched() -> list[Any]:
    """Return the functions that the guard replaces."""
    tensor = (torch.Tensor.copy_, torch.Tensor.to)
    return [torch.cuda.synchronize, torch.accelerator.synchronize, *tensor, warnings.showwarning]


# Installation.


@pytest.mark.parametrize("value", ["", "off"])
def test_nothing_is_installed_when_it_is_off(value: str, guard: Guard) -> None:
    before, filters = watched(), list(warnings.filters)
    assert vars(guard.installed(value)) == {}
    assert watched() == before
    assert warnings.filters == filters


@pytest.mark.parametrize(("platform", "available"), [(False, True), (True, False)])
def test_without_cuda_the_log_says_once_that_there_is_nothing_to_guard(
    platform: bool, available: bool, guard: Guard
) -> None:
    there = SimpleNamespace(is_cuda_alike=lambda: platform)
    guard.patch.setattr(sync_guard, "current_platform", there)
    guard.patch.setattr(torch.cuda, "is_available", lambda: available)
    before = watched()
    for _ in range(2):
        assert vars(guard.installed("error")) == {}
    assert watched() == before
    ((level, message),) = guard.records
    assert level == "WARNING"
    assert "nothing to guard" in message


def test_starting_an_engine_guards_its_runner_and_logs_it(guard: Guard) -> None:
    guard.patch.setenv(switch.SYNC_GUARD, "error")
    runner = Runner()
    startup.start(runner)
    with pytest.raises(DeviceSyncError):
        runner.sample_tokens(guard.wait)
    assert any("(VLLM_READINESS_SYNC_GUARD=error)" in message for _, message in guard.records)


def test_functions_are_wrapped_once_whatever_is_guarded_twice(guard: Guard) -> None:
    """Another runner, or the same one by the overlay and by a plugin."""
    runner = guard.installed("warn")
    once = watched()
    guard.installed("error")
    sync_guard.install(runner)
    assert watched() == once
    assert runner.sample_tokens(guard.wait) == 7
    assert len(guard.reports()) == 1
    assert guard.mode == DEFAULT


# The mode.


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("word", ["warn", "error"])
@pytest.mark.parametrize("before", [DEFAULT, WARN, ERROR])
def test_a_step_runs_under_the_mode_warn_and_restores_the_one_before(
    function: str, word: str, before: int, guard: Guard
) -> None:
    step = getattr(guard.installed(word), function)
    guard.mode = before
    assert step(guard.get_mode) == WARN
    assert guard.mode == before
    with pytest.raises(ZeroDivisionError):
        step(lambda: 1 // 0)
    assert guard.mode == before


def test_the_dummy_steps_of_a_warm_up_are_not_guarded(guard: Guard) -> None:
    runner = guard.installed("error")
    assert runner.execute_model(guard.wait, dummy_run=True) == 7
    with pytest.raises(DeviceSyncError):
        runner.execute_model(guard.wait)


# Reports of a wait.


def test_an_error_names_the_function_and_the_next_step(guard: Guard) -> None:
    def planted() -> None:
        guard.wait()

    with pytest.raises(RuntimeError, match=r"^sample_tokens waits for the device") as caught:
        guard.installed("error").sample_tokens(planted)
    assert "VLLM_READINESS_SYNC_GUARD=warn lists every such place; unset it" in str(caught.value)
    assert "in planted" in "".join(traceback.format_exception(caught.value))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_warning_is_logged_with_the_stack_of_the_step(guard: Guard) -> None:
    def planted() -> int:
        return guard.wait()

    assert guard.installed("warn").sample_tokens(planted) == 7
    (report,) = guard.reports()
    first, *frames = report.splitlines()
    assert first.startswith("sample_tokens waits for the device: it called a synchronizing")
    assert "in sample_tokens" in frames[0]
    assert any("in planted" in frame for frame in frames)
    assert "return guard.wait()" in report
    assert sync_guard.__file__ not in report
    assert "test_a_warning_is_logged" not in report


def test_each_stack_is_logged_once(guard: Guard) -> None:
    """Stacks of different functions, lines, or ways to one line."""
    runner = guard.installed("warn")

    def here() -> None:
        guard.wait()

    def there() -> None:
        guard.wait()

    def detour() -> None:
        here()

    execute, sample = runner.execute_model, runner.sample_tokens
    stacks: list[Any] = [(sample, here), (sample, there), (execute, here), (execute, detour)]
    for _ in range(3):
        for step, work in stacks:
            step(work)
    assert len(guard.reports()) == len(stacks)


# Threads.


def in_thread(work: Callable[[], object]) -> object:
    """Return what the work returns in another thread, or what it raises."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        return future.exception() or future.result()


@pytest.mark.parametrize("word", ["warn", "error"])
def test_a_wait_in_another_thread_is_its_own_affair(word: str, guard: Guard) -> None:
    """Torch's mode is the process's, so that torch warns in that thread."""
    shown: list[str] = []
    guard.patch.setattr(warnings, "showwarning", lambda message, *_: shown.append(str(message)))
    runner = guard.installed(word)

    def beside() -> int:
        torch.cuda.synchronize()
        return guard.wait()

    assert runner.sample_tokens(lambda: in_thread(beside)) == 7
    assert (guard.reports(), shown) == ([], [])
    guard.mode = WARN
    assert in_thread(beside) == runner.sample_tokens(lambda: in_thread(beside)) == 7
    assert (guard.reports(), len(shown)) == ([], 2)
    guard.mode = ERROR
    for found in (runner.sample_tokens(lambda: in_thread(beside)), in_thread(beside)):
        assert type(found) is RuntimeError
        assert "called a synchronizing" in str(found)


# Compilation.


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("word", ["warn", "error"])
def test_waits_of_torch_compile_are_left_alone(word: str, reset: bool, guard: Guard) -> None:
    """The real callbacks announce them; nested compilations are one."""
    runner = guard.installed(word)
    if reset:  # it drops every callback
        torch._dynamo.reset()

    def compiles() -> None:
        with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0/0"):
            with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "1/0"):
                guard.wait()
                torch.cuda.synchronize()
            guard.wait()

    runner.sample_tokens(compiles)
    assert guard.reports() == []
    compiles()

    def compiles_and_waits() -> None:
        compiles()
        guard.wait()

    if word == "error":
        with pytest.raises(DeviceSyncError):
            runner.sample_tokens(compiles_and_waits)
    else:
        runner.sample_tokens(compiles_and_waits)
        assert len(guard.reports()) == 1


def test_benchmarks_of_compiled_kernels_are_left_alone(guard: Guard) -> None:
    runner = guard.installed("error")
    source = "def trial():\n    torch.cuda.synchronize()\n"
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(source, "/site/torch/_inductor/runtime/benchmarking.py", "exec"), scope)
    runner.sample_tokens(scope["trial"])
    exec(compile(source, "/site/torch/_other/benchmarking.py", "exec"), scope)
    with pytest.raises(DeviceSyncError):
        runner.sample_tokens(scope["trial"])
