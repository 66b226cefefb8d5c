"""An engine in this process under the same traffic, whose host work is timed by kind of step."""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from bench.loops.rows import Request, Source
from bench.parts import Clock, time_parts
from bench.runners.scheduler import KINDS, Steps

#: Least number of steps of a kind.
_FEWEST = 5


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
        runner = self._core.model_executor.driver_worker.worker.model_runner
        #: Kind of step and part to nanoseconds.
        self._times: defaultdict[tuple[str | None, str], list[int]] = defaultdict(list)
        watch(self._core.scheduler, runner, self._times)

    def warm_up(self, source: Source) -> None:
        """Send a short request from each place."""
        live = self._begin([source.warmup(place) for place in range(source.concurrency)])
        while live:
            self._step(live)

    def measure(self, source: Source, ramp: float, seconds: float) -> dict[str, Any]:
        """Measure a slice; return its "figures": medians of each part by kind of step, in ms.

        Args:
            source: of the requests.
            ramp: seconds of traffic before the measured ones.
            seconds: that are measured.
        """
        live = self._begin([source.following(place) for place in range(source.concurrency)])
        for length in (ramp, seconds):
            self._times.clear()
            end = time.perf_counter() + length
            while time.perf_counter() < end:
                live |= self._begin([source.following(one.place) for one in self._step(live)])
        figures = {
            f"{part} p50, {kind}": statistics.median(times) / 1e6
            for kind in KINDS
            for (of, part), times in self._times.items()
            if of == kind and len(times) >= _FEWEST
        }
        self._engine.abort_request(list(live))
        while self._core.scheduler.has_requests() or self._core.batch_queue:
            self._engine.engine_core.get_output()
        return {"figures": figures}

    def shutdown(self) -> None:
        """End the engine."""
        self._engine.engine_core.shutdown()

    def _begin(self, requests: list[Request]) -> dict[str, Request]:
        for one in requests:
            self._engine.add_request(one.name, one.prompt, one.sampling)
        return {one.name: one for one in requests}

    def _step(self, live: dict[str, Request]) -> list[Request]:
        """Take a step; return the requests that it has finished."""
        return [live.pop(out.request_id) for out in self._engine.step() if out.finished]


def watch(
    scheduler: Any, runner: Any, times: defaultdict[tuple[str | None, str], list[int]]
) -> None:
    """Append the time of each part of each step from now on, in nanoseconds.

    Under asynchronous scheduling a step's output is processed after the next step was scheduled.

    Args:
        scheduler: of the engine.
        runner: of the engine.
        times: gets the times, by kind of step and part.
    """
    clock, steps = Clock(), Steps()
    time_parts(clock, scheduler, runner, 1 + int(os.environ["VLLM_USE_V2_MODEL_RUNNER"]))
    schedule, execute = scheduler.schedule, runner.execute_model
    sample, update = runner.sample_tokens, scheduler.update_from_output
    current: str | None = None

    def note(kind: str | None) -> None:
        for part, spent in clock.lap().items():
            times[kind, part].append(spent)

    def scheduled() -> Any:
        output = schedule()
        output.traffic_kind = steps.kind(output)
        note(output.traffic_kind)
        return output

    def executed(output: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal current
        current = output.traffic_kind
        result = execute(output, *args, **kwargs)
        note(current)
        return result

    def sampled(*args: Any, **kwargs: Any) -> Any:
        result = sample(*args, **kwargs)
        note(current)
        return result

    def updated(output: Any, *args: Any) -> Any:
        result = update(output, *args)
        note(output.traffic_kind)
        return result

    scheduler.schedule, runner.execute_model = scheduled, executed
    runner.sample_tokens, scheduler.update_from_output = sampled, updated
