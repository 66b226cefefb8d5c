"""The host's work in a decode step with the fixes on and off, measured in this process.

    python -m bench.host_work OUT LOAD

LOAD is a :class:`Load` as JSON. OUT gets JSON: the device, which fixes each engine has on, the
times of each part, and digests of the tokens.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from demo import model

from bench.compare.installations import in_turn
from bench.engines.arguments import GENERATED, arguments

#: Engine to its value of VLLM_READINESS, in the order in which they are made. The first two are
#: alike, and differ by noise alone.
ENGINES: Mapping[str, str] = {"on": "on", "on again": "on", "off": "-fixes"}
#: The functions of the scheduler and the runner that are timed, in the order of a step.
PARTS = ("schedule", "execute_model", "sample_tokens", "update_from_output")
#: All of them.
TOGETHER = "together"
#: Tokens of a prompt, and steps before the measured ones.
PROMPT, WARMUP = 16, 8


class Load(NamedTuple):
    """The size of the measurement.

    Attributes:
        batch: requests, all of them greedy and plain.
        steps: that are measured.
        reverse: whether the last of :data:`ENGINES` is made first. An engine that is made
            earlier is slower, whatever is on.
    """

    batch: int
    steps: int
    reverse: bool = False

    @property
    def output(self) -> int:
        """Tokens of each request: it outlasts what is measured."""
        return WARMUP + self.steps + 4


class Clock:
    """Nanoseconds of the host in the functions that it times, without the model's own."""

    def __init__(self) -> None:
        self._spent: dict[str, int] = {}
        self._excluded = 0

    def time(self, owner: object, name: str, part: str | None = None) -> None:
        """Time a method of an object from now on, as a part; by default of its own name."""
        self._wrap(owner, name, lambda _, spent: self._add(part or name, spent))

    def exclude(self, owner: object, name: str) -> None:
        """Take the time in a method out of that of its callers."""

        def add(_: str, spent: int) -> None:
            self._excluded += spent

        self._wrap(owner, name, add)

    def lap(self) -> dict[str, int]:
        """Return the time in each part since the last lap."""
        lap, self._spent = self._spent, {}
        return lap

    def _add(self, name: str, spent: int) -> None:
        self._spent[name] = self._spent.get(name, 0) + spent

    def _wrap(self, owner: object, name: str, add: Callable[[str, int], None]) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            excluded, start = self._excluded, time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                add(name, time.perf_counter_ns() - start - (self._excluded - excluded))

        setattr(owner, name, timed)


class Engine:
    """An engine in this process that generates for the whole batch.

    Attributes:
        fixes: the fixes that are on.
        laps: for each step, nanoseconds in each part.
        tokens: those of each finished request, by its name.
    """

    def __init__(self, word: str, load: Load, home: Path) -> None:
        """Make the engine with this value of VLLM_READINESS, and add the requests."""
        self._word = word
        self._choose()

        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.executor.uniproc_executor import UniProcExecutor
        from vllm.v1.readiness import registry

        length = PROMPT + load.output
        engine_args = arguments(
            model.write(home, max_position_embeddings=max(length, 512)),
            load.batch,
            length,
            {load.batch},
            **GENERATED,
            max_num_batched_tokens=max(load.batch * PROMPT, length),
            gpu_memory_utilization=0.2,
            num_gpu_blocks_override=load.batch * (length // 16 + 2),
            # By its class: for its name vLLM starts a process on the CPU.
            distributed_executor_backend=UniProcExecutor,
        )
        self._engine = LLMEngine.from_engine_args(engine_args)
        core = self._engine.engine_core.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        self.fixes = sorted(runner.input_batch.readiness.on & registry.FIXES.keys())
        self.clock = Clock()
        for part in PARTS:
            scheduled = part in ("schedule", "update_from_output")
            self.clock.time(core.scheduler if scheduled else runner, part)
        self.clock.exclude(runner, "_model_forward")
        self.clock.exclude(runner.model, "compute_logits")
        self.laps: list[dict[str, int]] = []
        self.tokens: dict[str, list[int]] = {}
        self._add_requests(load)

    def _choose(self) -> None:
        """Have the environment say what this engine has on: a fix may read it at any time."""
        os.environ["VLLM_READINESS"] = self._word

    def _add_requests(self, load: Load) -> None:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        for request in range(load.batch):
            start = request * PROMPT
            prompt = [3 + 7919 * k % 1000 for k in range(start, start + PROMPT)]
            sampling = SamplingParams(
                temperature=0.0,
                max_tokens=load.output,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            tokens = TokensPrompt(prompt_token_ids=prompt)
            self._engine.add_request(str(request), tokens, sampling)

    def step(self) -> None:
        """Take one step."""
        self._choose()
        outputs = self._engine.step()
        self.laps.append(self.clock.lap())
        for output in outputs:
            self.tokens[output.request_id] = list(output.outputs[0].token_ids)

    def finish(self) -> None:
        """Take the steps that are left."""
        while self._engine.has_unfinished_requests():
            self.step()

    def times(self, part: str) -> list[float]:
        """Return microseconds in a part, for each measured step."""
        parts = PARTS if part == TOGETHER else (part,)
        laps = self.laps[WARMUP:]
        return [sum(lap.get(name, 0) for name in parts) / 1e3 for lap in laps]


def measure(load: Load, home: Path) -> dict[str, Any]:
    """Measure the vLLM of this process: an engine with the fixes on, one like it, and one without.

    They take their steps by turns, each of them first equally often.
    """
    import torch

    names = sorted(ENGINES, key=list(ENGINES).index, reverse=load.reverse)
    engines = {name: Engine(ENGINES[name], load, home) for name in names}
    gc.collect()
    gc.freeze()
    gc.disable()
    for number in range(WARMUP + load.steps):
        for name in in_turn(number, tuple(engines)):
            engines[name].step()
    times = {
        part: {name: engine.times(part) for name, engine in engines.items()}
        for part in (*PARTS, TOGETHER)
    }
    for engine in engines.values():
        engine.finish()
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "fixes": {name: engine.fixes for name, engine in engines.items()},
        "parts": {part: _figures(of) for part, of in times.items()},
        "tokens": {name: _digest(engine.tokens, load) for name, engine in engines.items()},
    }


def _figures(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median of each engine, and of the differences step by step."""

    def difference(one: str, other: str) -> float:
        pairs = zip(times[one], times[other], strict=True)
        return statistics.median(a - b for a, b in pairs)

    return {
        **{name: statistics.median(values) for name, values in times.items()},
        "cost": difference("on", "off"),
        "noise": difference("on again", "on"),
    }


def _digest(tokens: Mapping[str, Sequence[int]], load: Load) -> str:
    ordered = [list(tokens[str(request)]) for request in range(load.batch)]
    return hashlib.sha256(json.dumps(ordered).encode()).hexdigest()


if __name__ == "__main__":
    out, load_json = sys.argv[1:]
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(Load(**json.loads(load_json)), Path(scratch))
    Path(out).write_text(json.dumps(result))
