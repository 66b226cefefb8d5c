"""An engine in this process under the same traffic, and its host work by kind of step."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from bench.loops.rows import Request, Source, quantiles
from bench.parts import Clock, time_parts

#: Kinds of step: with the requests of the step before; of other requests; with a prompt in it.
SAME, CHANGED, MIXED = KINDS = ("same", "changed", "mixed")
PARTS = (
    *("execute_model", "_update_states", "_prepare_inputs", "sample_tokens"),
    *("schedule", "update_from_output"),
)


class Steps:
    """Tells kinds of step apart, in the order in which the steps are scheduled."""

    def __init__(self) -> None:
        self._before: frozenset[str] = frozenset()

    def kind(self, output: Any) -> str | None:
        """Return the kind of a SchedulerOutput's step; None if it has no tokens."""
        requests = frozenset(output.num_scheduled_tokens)
        before, self._before = self._before, requests
        if not requests:
            return None
        if output.scheduled_new_reqs or max(output.num_scheduled_tokens.values()) > 1:
            return MIXED
        return SAME if requests == before else CHANGED


class Stepped:
    """An engine whose steps are timed.

    Args:
        arguments: of vLLM's EngineArgs.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self._engine: Any = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self._core = self._engine.engine_core.engine_core
        self._clock, self._steps = Clock(), Steps()
        #: Kind to part to nanoseconds.
        self._times: defaultdict[str, defaultdict[str, list[int]]]
        self._times = defaultdict(lambda: defaultdict(list))
        self._watch()

    def warm_up(self, source: Source) -> None:
        """Send a short request from each place."""
        live: dict[str, Request] = {}
        for place in range(source.concurrency):
            self._add(source.warmup(place), live)
        while live:
            self._step(live)

    def measure(self, source: Source, ramp: float, seconds: float) -> dict[str, Any]:
        """Measure a slice; see :meth:`bench.loops.served.Served.measure`."""
        live: dict[str, Request] = {}
        for place in range(source.concurrency):
            self._add(source.following(place), live)
        for length in (ramp, seconds):
            self._times.clear()
            end = time.perf_counter() + length
            while time.perf_counter() < end:
                for request in self._step(live):
                    self._add(source.following(request.place), live)
        self._engine.abort_request(list(live))
        while self._core.scheduler.has_requests() or self._core.batch_queue:
            self._engine.engine_core.get_output()
        return {"figures": self._figures()}

    def shutdown(self) -> None:
        """End the engine."""
        self._engine.engine_core.shutdown()

    def _add(self, request: Request, live: dict[str, Request]) -> None:
        live[request.name] = request
        self._engine.add_request(request.name, request.prompt, request.sampling)

    def _step(self, live: dict[str, Request]) -> list[Request]:
        """Take a step; return the requests that it has finished."""
        return [live.pop(out.request_id) for out in self._engine.step() if out.finished]

    def _figures(self) -> dict[str, float]:
        """Return the number of steps of each kind, and quantiles of each part in ms."""
        figures: dict[str, float] = {}
        for kind in KINDS:
            times = self._times[kind]
            figures[f"steps, {kind}"] = len(times["schedule"])
            for part in PARTS:
                seconds = [spent / 1e9 for spent in times[part]]
                of_part = quantiles(part, seconds)
                figures |= {f"{name}, {kind}": value for name, value in of_part.items()}
        return figures

    def _watch(self) -> None:
        """File the times of each part under the kind of its step.

        A step's parts may come after the next step's: under asynchronous scheduling its output
        is processed later, and with grammars it may be sampled later.
        """
        scheduler = self._core.scheduler
        runner = self._core.model_executor.driver_worker.worker.model_runner
        version = 1 + int(os.environ["VLLM_USE_V2_MODEL_RUNNER"])
        time_parts(self._clock, scheduler, runner, version)
        schedule, current = scheduler.schedule, None

        def scheduled() -> Any:
            output = schedule()
            output.traffic_kind = self._steps.kind(output)
            self._file(output.traffic_kind)
            return output

        def filed(function: Callable[..., Any], of_output: bool) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal current
                kind = args[0].traffic_kind if of_output else current
                if function is execute:
                    current = kind
                result = function(*args, **kwargs)
                self._file(kind)
                return result

            return call

        execute = runner.execute_model
        scheduler.schedule = scheduled
        runner.execute_model = filed(execute, of_output=True)
        runner.sample_tokens = filed(runner.sample_tokens, of_output=False)
        scheduler.update_from_output = filed(scheduler.update_from_output, of_output=True)

    def _file(self, kind: str | None) -> None:
        for part, spent in self._clock.lap().items():
            if kind is not None:
                self._times[kind][part].append(spent)
