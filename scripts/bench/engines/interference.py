"""Changes to an engine's steps that some cases measure: early consumption, foreign copies."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any

from bench.engines.foreign_copies import ForeignCopies


class Interference:
    """Wrappers around the runner's methods; install them before an engine is made, and once.

    Attributes:
        foreign: copies to launch as steps begin; None for none.
        consume: whether each output is waited for as soon as it exists.
        runner: version of the model runner that ran; None if it ran in another process.
    """

    def __init__(self) -> None:
        self.runner: int | None = None
        self.foreign: ForeignCopies | None = None
        self.consume = False

    def install(self) -> None:
        """Wrap the methods of both model runners, and of their asynchronous outputs."""
        for version in (1, 2):
            runner, output = _runner(version)
            runner.execute_model = self._execute_model(runner.execute_model, version)
            runner.sample_tokens = _print_exceptions(runner.sample_tokens)
            output.__init__ = self._init_output(output.__init__)
            output.get_output = _get_output(output.get_output)

    def _execute_model(self, function: Callable[..., Any], version: int) -> Callable[..., Any]:
        @functools.wraps(function)
        def execute_model(*args: Any, **kwargs: Any) -> Any:
            self.runner = version
            if self.foreign is not None:
                self.foreign.step()
            return function(*args, **kwargs)

        return execute_model

    def _init_output(self, function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def init(output: Any, *args: Any, **kwargs: Any) -> None:
            function(output, *args, **kwargs)
            if self.consume:
                # get_output drops attributes that the runner still reads: put them back.
                before = dict(vars(output))
                early = output.get_output()
                vars(output).update({**before, "_early": early})

        return init


def _get_output(function: Callable[[Any], Any]) -> Callable[[Any], object]:
    """Return the output that was consumed early, if there is one."""

    @functools.wraps(function)
    def get_output(output: Any) -> object:
        early = vars(output).pop("_early", None)
        return function(output) if early is None else early

    return get_output


def _print_exceptions(function: Callable[..., Any]) -> Callable[..., Any]:
    """Print an exception at once: the executor keeps it, and the next step fails of it."""

    @functools.wraps(function)
    def printing(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception:
            traceback.print_exc()
            raise

    return printing


def _runner(version: int) -> tuple[Any, Any]:
    """Return the classes of a model runner and of its asynchronous output."""
    if version == 1:
        v1 = import_module("vllm.v1.worker.gpu_model_runner")
        return v1.GPUModelRunner, v1.AsyncGPUModelRunnerOutput
    v2 = import_module("vllm.v1.worker.gpu.model_runner")
    return v2.GPUModelRunner, import_module("vllm.v1.worker.gpu.async_utils").AsyncOutput
