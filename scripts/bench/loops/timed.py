"""An engine in this process under the same traffic, whose host work is timed by kind of step."""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from bench.loops.arguments import arguments
from bench.loops.rows import SHAPES, Request, request

#: Kinds of step: with the requests of the step before; of other requests; with a prompt in it.
SAME, CHANGED, MIXED = KINDS = ("same", "changed", "mixed")
#: Least number of steps of a kind.
_FEWEST = 5
#: Version of the runner to its methods, or those of an attribute of it, to the part of
#: ``execute_model`` that they belong to.
_PARTS: Mapping[int, Mapping[str, str]] = {
    1: {
        "_update_states": "_update_states",
        "_prepare_inputs": "_prepare_inputs",
        "_build_attention_metadata": "_build_attention_metadata",
    },
    2: {
        "finish_requests": "_update_states",
        "free_states": "_update_states",
        "add_requests": "_update_states",
        "update_requests": "_update_states",
        "block_tables.apply_staged_writes": "_update_states",
        "prepare_inputs": "_prepare_inputs",
        "prepare_attn": "_build_attention_metadata",
        "model_state.prepare_attn": "_build_attention_metadata",
    },
}
#: Version of the runner to the methods that are the model's own work.
_MODEL = {
    1: ("_model_forward", "model.compute_logits"),
    2: ("cudagraph_manager.run_fullgraph", "model.forward", "model.compute_logits"),
}


class Timed:
    """An engine whose steps are timed.

    Args:
        spec: as of :class:`bench.loops.served.Served`.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self._spec = spec
        self._engine: Any = LLMEngine.from_engine_args(EngineArgs(**arguments(spec)))
        self._core = self._engine.engine_core.engine_core
        runner = self._core.model_executor.driver_worker.worker.model_runner
        version = 1 + int(os.environ["VLLM_USE_V2_MODEL_RUNNER"])
        self._times = Clock(self._core.scheduler, runner, version).times

    def warm_up(self, case: tuple[str, str], seed: int) -> None:
        """Send a short request from each place."""
        places = range(SHAPES[case[0]].concurrency)
        live = self._begin([request(case, seed, place, -1) for place in places])
        while live:
            self._step(live)

    def measure(self, case: tuple[str, str], seed: int) -> dict[str, Any]:
        """Measure a slice; return its "figures": medians of each part by kind of step, in ms."""
        places = range(SHAPES[case[0]].concurrency)
        live = self._begin([request(case, seed, place, 0) for place in places])
        for length in (self._spec["ramp"], self._spec["seconds"]):
            self._times.clear()
            end = time.perf_counter() + length
            while time.perf_counter() < end:
                ended = self._step(live)
                live |= self._begin([request(case, seed, n.place, n.number + 1) for n in ended])
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


class Clock:
    """The host's time in each part of an engine's steps.

    ``model`` is that of the model's forward and logits, which no other part has in it.
    Under asynchronous scheduling a step's output is processed after the next step was scheduled.

    Attributes:
        times: kind of step and part to nanoseconds, an entry for each step.
    """

    def __init__(self, scheduler: Any, runner: Any, version: int) -> None:
        """Time the steps of a scheduler and a runner, of this version, from now on."""
        self.times: defaultdict[tuple[str | None, str], list[int]] = defaultdict(list)
        self._model = 0
        self._parts = Counter[str]()
        self._requests: frozenset[str] = frozenset()
        #: Kind of the step that the runner took last.
        self._kind: str | None = None
        for path in _MODEL[version]:
            self._wrap(runner, path, self._exclude)
        for path, part in _PARTS[version].items():
            self._wrap(runner, path, functools.partial(self._inner, part))
        self._wrap(runner, "execute_model", self._executed)
        self._wrap(runner, "sample_tokens", self._sampled)
        self._wrap(scheduler, "schedule", self._scheduled)
        self._wrap(scheduler, "update_from_output", self._updated)

    def kind(self, output: Any) -> str | None:
        """Return the kind of the next SchedulerOutput's step; None if it has no tokens."""
        requests = frozenset(output.num_scheduled_tokens)
        before, self._requests = self._requests, requests
        if not requests:
            return None
        if output.scheduled_new_reqs or max(output.num_scheduled_tokens.values()) > 1:
            return MIXED
        return SAME if requests == before else CHANGED

    def _exclude(self, spent: int, *_: Any) -> None:
        self._model += spent
        self._parts["model"] += spent

    def _inner(self, part: str, spent: int, *_: Any) -> None:
        self._parts[part] += spent

    def _executed(self, spent: int, _: Any, output: Any, *__: Any) -> None:
        self._kind = output.traffic_kind
        for part, of_part in {**self._parts, "execute_model": spent}.items():
            self.times[self._kind, part].append(of_part)
        self._parts.clear()

    def _sampled(self, spent: int, *_: Any) -> None:
        self.times[self._kind, "sample_tokens"].append(spent)

    def _scheduled(self, spent: int, output: Any) -> None:
        output.traffic_kind = self.kind(output)
        self.times[output.traffic_kind, "schedule"].append(spent)

    def _updated(self, spent: int, _: Any, output: Any, *__: Any) -> None:
        self.times[output.traffic_kind, "update_from_output"].append(spent)

    def _wrap(self, owner: Any, path: str, note: Callable[..., None]) -> None:
        """Pass on a method's time without the model's, its result and its arguments."""
        *attributes, name = path.split(".")
        owner = functools.reduce(getattr, attributes, owner)
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            model, start = self._model, time.perf_counter_ns()
            result = function(*args, **kwargs)
            spent = time.perf_counter_ns() - start - (self._model - model)
            note(spent, result, *args)
            return result

        setattr(owner, name, timed)
