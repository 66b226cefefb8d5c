"""Wrappers of the observed methods of runners, their outputs, schedulers and engine cores."""

# mirrors: nothing

import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType, ModuleType
from typing import Any

from vllm.v1.readiness import registry
from vllm.v1.readiness.watch.probe import events
from vllm.v1.readiness.watch.probe.recorder import (
    existing,
    now,
    record_fence,
    recorder,
    this_thread,
)
from vllm.v1.readiness.watch.probe.ring import EXECUTE, GET_OUTPUT, SAMPLE, SCHEDULE, UPDATE
from vllm.v1.readiness.watch.wrapping import Function, wrap_once

#: Prefix of the request ids of runner V2's warm-up.
_WARM_UP = "_warmup_"
_wrap = partial(wrap_once, by=__name__)


def watch_runner(module: ModuleType) -> None:
    """Observe a module's ``GPUModelRunner``, and V1's asynchronous output if present."""
    runner = module.GPUModelRunner
    _wrap(runner, "execute_model", _execute_model)
    _wrap(runner, "sample_tokens", _sample_tokens)
    for name, wrapper in (("_to_list", _to_list), ("_sync_device", _sync_device)):
        if hasattr(runner, name):
            _wrap(runner, name, wrapper)
    if hasattr(module, "AsyncGPUModelRunnerOutput"):
        _watch_output(module.AsyncGPUModelRunnerOutput)


def watch_mrv2_output(module: ModuleType) -> None:
    """Observe runner V2's asynchronous output."""
    import torch

    _watch_output(module.AsyncOutput, torch.cuda.Event)


def watch_scheduler(module: ModuleType) -> None:
    """Observe the scheduler."""
    _wrap(module.Scheduler, "schedule", _schedule)
    _wrap(module.Scheduler, "update_from_output", _update_from_output)


def watch_core(module: ModuleType) -> None:
    """Write an engine core's file before it shuts down."""
    _wrap(module.EngineCore, "shutdown", _shutdown)


def watch_overlay_outputs(module: ModuleType) -> None:
    """Observe the overlay's replacement of ``_to_list``."""
    _wrap(module.Outputs, "show", _to_list)


#: Module name to the function that observes its classes.
WATCHED: Mapping[str, Callable[[ModuleType], None]] = MappingProxyType(
    {
        "vllm.v1.worker.gpu_model_runner": watch_runner,
        "vllm.v1.worker.gpu.model_runner": watch_runner,
        "vllm.v1.worker.gpu.async_utils": watch_mrv2_output,
        "vllm.v1.core.sched.scheduler": watch_scheduler,
        "vllm.v1.engine.core": watch_core,
        "vllm.v1.readiness.outputs.model_outputs": watch_overlay_outputs,
    }
)


def _watch_output(output: type, event_type: Function | None = None) -> None:
    """Observe a class of asynchronous outputs; ``event_type`` is by default ``torch.Event``."""
    _wrap(output, "__init__", partial(_output_init, event_type=event_type))
    _wrap(output, "get_output", _get_output)


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
        current = recorder()
        continuing = len(scheduler_output.scheduled_cached_reqs.req_ids)
        pending, this_thread.pending = this_thread.pending, 0
        began = now()
        step = current.begin_step(self.vllm_config, continuing)
        try:
            return original(self, scheduler_output, *args, **kwargs)
        finally:
            ended = current.record(EXECUTE, began, step, continuing)
            this_thread.pending = ended if pending else 0

    return execute_model


def _sample_tokens(original: Function) -> Function:
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        if this_thread.idle:
            return original(self, *args, **kwargs)
        current = recorder()
        began = now()
        output = None
        try:
            output = original(self, *args, **kwargs)
            return output
        finally:
            ended = current.record(SAMPLE, began)
            if output is not None and not hasattr(output, "get_output"):
                current.record_output(ended, current.step, current.continuing)

    return sample_tokens


def _output_init(original: Function, event_type: Function | None) -> Function:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if this_thread.idle:
            original(self, *args, **kwargs)
            return
        current = recorder()
        started = events.recorded_now(event_type)
        launched = now()
        this_thread.timing = True
        try:
            original(self, *args, **kwargs)
        finally:
            this_thread.timing = False
        self._probe = current.step, current.continuing, started, launched

    return __init__


def _get_output(original: Function) -> Function:
    def get_output(self: Any) -> Any:
        step, continuing, started, launched = getattr(self, "_probe", (0, 0, None, 0))
        if not step:  # created before the probe was on, or in an idle step
            return original(self)
        current = recorder()
        this_thread.output_step, this_thread.event = step, None
        began = now()
        try:
            return original(self)
        finally:
            this_thread.output_step = this_thread.pending = 0
            ended = current.record(GET_OUTPUT, began, step)
            current.record_readback(started, launched, step)
            current.record_output(ended, step, continuing)

    return get_output


def _to_list(original: Function) -> Function:
    def to_list(self: Any, sampled: Any) -> Any:
        # The overlaid runner may pass ids on the host.
        started = None if getattr(sampled, "is_cpu", False) else events.recorded_now()
        if started is None:
            return original(self, sampled)
        launched = now()
        this_thread.event, this_thread.timing = None, True
        try:
            if getattr(self, "transfer_event", None) is not getattr(self, "_probe_event", None):
                # Upstream's runner reuses one event without timing.
                self.transfer_event = self._probe_event = sys.modules["torch"].Event()
            return original(self, sampled)
        finally:
            this_thread.timing = False
            current = recorder()
            current.record_readback(started, launched, current.step)

    return to_list


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
        current = recorder()
        current.set_engine(self.vllm_config)
        output = None
        began = now()
        try:
            output = original(self, *args, **kwargs)
            return output
        finally:
            ended = current.record(SCHEDULE, began)
            # The grammars of this step need the tokens of the previous step.
            waits = getattr(output, "pending_structured_output_tokens", False)
            this_thread.pending = ended if waits else 0

    return schedule


def _update_from_output(original: Function) -> Function:
    def update_from_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        current = recorder()
        began = now()
        if this_thread.pending:  # the worker runs in another process
            record_fence(registry.GRAMMARS, this_thread.pending, began)
            this_thread.pending = 0
        try:
            return original(self, *args, **kwargs)
        finally:
            current.record(UPDATE, began)

    return update_from_output


def _shutdown(original: Function) -> Function:
    def shutdown(*args: Any, **kwargs: Any) -> Any:
        if (current := existing()) is not None:
            current.write()
        return original(*args, **kwargs)

    return shutdown
