"""Wrappers of the observed methods of runners, their outputs, schedulers and engine cores."""

# mirrors: nothing

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType, ModuleType
from typing import Any

from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import subclasses
from vllm.v1.readiness.watch.probe.events import DeviceTimes
from vllm.v1.readiness.watch.probe.histograms import count_tokens, export_gauges, observe
from vllm.v1.readiness.watch.wrapping import Function, wrap_once

#: Prefix of the request ids of runner V2's warm-up.
_WARM_UP = "_warmup_"
#: Nanoseconds between exports of the gauges.
_PERIOD = 2_000_000_000

_wrap = partial(wrap_once, by=__name__)
now = time.perf_counter_ns


class ThreadState(threading.local):
    """State of the current thread.

    Attributes:
        idle: whether the current step is not recorded.
        pending: when the engine core began to wait for tokens that grammars need, or 0.
    """

    idle = False
    pending = 0


class State:
    """State of this process.

    Attributes:
        worker, core: names of the worker and the engine core; empty before their first step.
        step: number of the worker's newest step.
        continuing: number of cached requests in this step.
        exported: when the gauges were exported last.
    """

    def __init__(self) -> None:
        self.worker = self.core = ""
        self.step = self.continuing = self.exported = 0
        self.device = DeviceTimes()
        self._last_output = self._last_output_step = 0

    def output(self, ended: int, step: int, continuing: int) -> None:
        """Record the delivery of an output; a second call for a step is a no-op."""
        if step == self._last_output_step:
            return
        if self._last_output and continuing:  # a step without cached requests follows a pause
            observe("output_interval", ended - self._last_output, self.worker)
        self._last_output, self._last_output_step = ended, step


this_thread = ThreadState()
state = State()


def _label(config: Any, worker: bool) -> str:
    """Return the name of a process, such as ``rank0``, ``dp1-rank0`` or ``engine0``."""
    parallel = config.parallel_config
    replica = parallel.data_parallel_index  # independent replicas differ only in this number
    if not worker:
        return f"engine{replica}"
    replicated = replica or parallel.data_parallel_size > 1
    return f"dp{replica}-rank{parallel.rank}" if replicated else f"rank{parallel.rank}"


def watch_runner(module: ModuleType) -> None:
    """Observe a module's ``GPUModelRunner``, and V1's asynchronous output if present."""
    runner = module.GPUModelRunner
    _wrap(runner, "execute_model", _execute_model)
    _wrap(runner, "sample_tokens", _sample_tokens)
    if hasattr(runner, "_sync_device"):
        _wrap(runner, "_sync_device", _sync_device)
    if hasattr(module, "AsyncGPUModelRunnerOutput"):
        _watch_output(module.AsyncGPUModelRunnerOutput)


def watch_mrv2_output(module: ModuleType) -> None:
    """Observe runner V2's asynchronous output."""
    _watch_output(module.AsyncOutput)


def watch_scheduler(module: ModuleType) -> None:
    """Observe the scheduler."""
    _wrap(module.Scheduler, "schedule", _schedule)
    _wrap(module.Scheduler, "update_from_output", _update_from_output)


#: Module name to the function that observes its classes.
WATCHED: Mapping[str, Callable[[ModuleType], None]] = MappingProxyType(
    {
        "vllm.v1.worker.gpu_model_runner": watch_runner,
        "vllm.v1.worker.gpu.model_runner": watch_runner,
        "vllm.v1.worker.gpu.async_utils": watch_mrv2_output,
        "vllm.v1.core.sched.scheduler": watch_scheduler,
    }
)


def _watch_output(output: type) -> None:
    """Observe a class of asynchronous outputs."""
    _wrap(output, "__init__", _output_init)
    _wrap(output, "get_output", _get_output)


def record_fence(owner: str, began: int, ended: int) -> None:
    """Record a wait of this thread for the device, except during the engine's start-up."""
    if process := state.worker or state.core:
        owner = registry.GRAMMARS if this_thread.pending else owner
        observe("fence", ended - began, process, owner)


def _execute_model(original: Function) -> Function:
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        # Idle steps only remove requests, or belong to runner V2's profiling or warm-up.
        this_thread.idle = (
            not scheduler_output.total_num_scheduled_tokens
            or bool(kwargs.get("dummy_run"))
            or next(iter(scheduler_output.num_scheduled_tokens)).startswith(_WARM_UP)
        )
        if this_thread.idle:
            return original(self, scheduler_output, *args, **kwargs)
        state.worker = state.worker or _label(self.vllm_config, worker=True)
        state.step += 1
        state.continuing = len(scheduler_output.scheduled_cached_reqs.req_ids)
        pending, this_thread.pending = this_thread.pending, 0
        on_device = state.device.begin()
        began = now()
        try:
            output = original(self, scheduler_output, *args, **kwargs)
        finally:
            ended = now()
            observe("execute_model", ended - began, state.worker)
        state.device.end(state.worker, "execute_model", on_device)
        this_thread.pending = ended if pending else 0
        if ended - state.exported > _PERIOD:
            state.exported = ended
            export_gauges(state.worker)
        return output

    return execute_model


def _sample_tokens(original: Function) -> Function:
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        if this_thread.idle:
            return original(self, *args, **kwargs)
        on_device = state.device.begin()
        began = now()
        try:
            output = original(self, *args, **kwargs)
        finally:
            ended = now()
            observe("sample_tokens", ended - began, state.worker)
        state.device.end(state.worker, "sample_tokens", on_device)
        if output is not None and not hasattr(output, "get_output"):
            state.output(ended, state.step, state.continuing)
        return output

    return sample_tokens


def _output_init(original: Function) -> Function:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if not this_thread.idle:
            self.readiness = state.step, state.continuing
        original(self, *args, **kwargs)

    return __init__


def _get_output(original: Function) -> Function:
    def get_output(self: Any) -> Any:
        step, continuing = getattr(self, subclasses.ATTRIBUTE, (0, 0))
        if not step:  # created before the probe was on, or in an idle step
            return original(self)
        began = now()
        try:
            return original(self)
        finally:
            this_thread.pending = 0
            ended = now()
            observe("get_output", ended - began, state.worker)
            state.output(ended, step, continuing)

    return get_output


def _sync_device(original: Function) -> Function:
    def sync_device(*args: Any, **kwargs: Any) -> Any:
        began = now()
        try:
            return original(*args, **kwargs)
        finally:
            record_fence("_sync_device", began, now())

    return sync_device


def _schedule(original: Function) -> Function:
    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        state.core = state.core or _label(self.vllm_config, worker=False)
        output = None
        began = now()
        try:
            output = original(self, *args, **kwargs)
            return output
        finally:
            ended = now()
            observe("schedule", ended - began, state.core)
            # The grammars of this step need the tokens of the previous step.
            waits = getattr(output, "pending_structured_output_tokens", False)
            this_thread.pending = ended if waits else 0

    return schedule


def _update_from_output(original: Function) -> Function:
    def update_from_output(self: Any, scheduler_output: Any, output: Any) -> Any:
        began = now()
        if this_thread.pending:  # the worker runs in another process
            record_fence(registry.GRAMMARS, this_thread.pending, began)
            this_thread.pending = 0
        try:
            return original(self, scheduler_output, output)
        finally:
            observe("update_from_output", now() - began, state.core)
            tokens = getattr(output, "sampled_token_ids", None)
            count_tokens(state.core, 0 if tokens is None else sum(map(len, tokens)))

    return update_from_output
