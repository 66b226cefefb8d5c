"""Time two schedulers of this process under the same traffic: stock's code path, and ours.

    python -m bench.runners.scheduler OUT LOAD

LOAD is a :class:`Load` as JSON. Both schedulers are the overlaid classes, in one process; with the
features off, upstream's code runs. A closed loop keeps a number of requests in flight. OUT gets
JSON: for each side, quantiles of each function by kind of step, and a digest of the decisions.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import sys
import tempfile
import time
from collections import defaultdict, deque
from pathlib import Path
from typing import Any, NamedTuple

from demo import model

from bench.runners.child import quantiles

#: Side to its value of VLLM_READINESS; "again" differs from "stock" by noise alone.
SIDES = {"stock": "-schedule,-update-outputs", "overlaid": "on"}
SIDES["again"] = SIDES["stock"]
#: Kinds of step: with the requests of the step before; of other requests; with a prompt in it.
SAME, CHANGED, MIXED = KINDS = ("same", "changed", "mixed")
#: Tokens of a block, max_model_len, and steps before the measured ones.
_BLOCK, _LENGTH, _WARMUP = 16, 2048, 300
#: Steps of a side before the next one takes as many.
_TURN = 50
#: Least number of steps of a kind.
_FEWEST = 20


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


class Load(NamedTuple):
    """Measurement of one process.

    Attributes:
        requests: in flight.
        steps: that are measured.
        reverse: whether the last side is made first.
        in_flight: steps that are scheduled ahead of their outputs; 2 for asynchronous scheduling.
    """

    requests: int
    steps: int
    reverse: bool = False
    in_flight: int = 2


class Loop:
    """A scheduler and its traffic.

    Args:
        words: value of VLLM_READINESS.
        load: the measurement.
        home: directory of the generated model.
    """

    def __init__(self, words: str, load: Load, home: Path) -> None:
        self._words, self._load = words, load
        os.environ["VLLM_READINESS"] = words
        self._scheduler = make(load, home)
        self._drawn = random.Random(5)  # noqa: S311 (draws no secret)
        self._count = self._live = 0
        self._waiting: deque[tuple[Any, Any]] = deque()
        self._steps, self._digest = Steps(), hashlib.sha256()
        #: Function and kind of step to seconds.
        self.times: defaultdict[tuple[str, str], list[float]] = defaultdict(list)

    def step(self, timed: bool) -> None:
        """Schedule a step, and process the output of the oldest one in flight."""
        from vllm.v1.outputs import ModelRunnerOutput

        os.environ["VLLM_READINESS"] = self._words
        scheduler = self._scheduler
        while self._live < self._load.requests:
            self._add()
        began = time.perf_counter()
        scheduled = scheduler.schedule()
        spent = time.perf_counter() - began
        names = list(scheduled.num_scheduled_tokens)
        kind = self._steps.kind(scheduled) or "idle"
        self._digest.update(repr(scheduled.num_scheduled_tokens).encode())
        tokens = [[] if scheduler.requests[name].is_prefill_chunk else [7] for name in names]
        output = ModelRunnerOutput(names, {name: n for n, name in enumerate(names)}, tokens)
        scheduled.traffic_kind = kind
        self._waiting.append((scheduled, output))
        if timed:
            self.times["schedule", kind].append(spent)
        if len(self._waiting) < self._load.in_flight:
            return
        scheduled, output = self._waiting.popleft()
        began = time.perf_counter()
        outputs = scheduler.update_from_output(scheduled, output)
        spent = time.perf_counter() - began
        ended = [
            one.request_id
            for of in outputs.values()
            for one in of.outputs
            if one.finish_reason is not None
        ]
        self._live -= len(ended)
        self._digest.update(repr(ended).encode())
        if timed:
            self.times["update_from_output", scheduled.traffic_kind].append(spent)

    def result(self) -> dict[str, Any]:
        """Return the figures, times in microseconds, and the digest."""
        figures = {
            f"{function} {quantile}, {kind}, us": value
            for (function, kind), seconds in sorted(self.times.items())
            if kind in KINDS and len(seconds) >= _FEWEST
            for quantile, value in quantiles([one * 1e6 for one in seconds]).items()
        }
        return {"figures": figures, "decisions": self._digest.hexdigest()}

    def _add(self) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        self._count += 1
        self._live += 1
        sampling = SamplingParams(max_tokens=self._drawn.randint(100, 300), ignore_eos=True)
        prompt = [self._drawn.randrange(1000) for _ in range(self._drawn.randint(50, 150))]
        request = Request(f"r{self._count}", prompt, sampling, None, arrival_time=self._count)
        self._scheduler.add_request(request)


def make(load: Load, home: Path) -> Any:
    """Make a scheduler, as the engine core does."""
    import torch
    from vllm.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    path = str(model.write(home, max_position_embeddings=_LENGTH))
    blocks, ahead = load.requests * (_LENGTH // _BLOCK // 4), load.in_flight > 1
    config = VllmConfig(
        model_config=ModelConfig(model=path, skip_tokenizer_init=True, seed=0),
        cache_config=CacheConfig(block_size=_BLOCK, enable_prefix_caching=False),
        parallel_config=ParallelConfig(),
        scheduler_config=SchedulerConfig(
            max_num_seqs=load.requests,
            max_num_batched_tokens=8192,
            max_model_len=_LENGTH,
            enable_chunked_prefill=True,
            async_scheduling=ahead,
            is_encoder_decoder=False,
        ),
    )
    config.cache_config.num_gpu_blocks = blocks
    config.scheduler_config.async_scheduling = ahead  # a CPU switches it off
    spec = FullAttentionSpec(block_size=_BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return (AsyncScheduler if ahead else Scheduler)(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        block_size=_BLOCK,
        hash_block_size=_BLOCK,
        log_stats=False,
        structured_output_manager=StructuredOutputManager(config),
    )


def measure(load: Load, home: Path) -> dict[str, Any]:
    """Measure all sides, a few steps of each in turn; return side to its result."""
    names = list(SIDES)[::-1] if load.reverse else list(SIDES)
    loops = {name: Loop(SIDES[name], load, home) for name in names}
    for _ in range(_WARMUP):
        for loop in loops.values():
            loop.step(timed=False)
    gc.collect()
    gc.freeze()
    for number in range(load.steps // _TURN):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            for _ in range(_TURN):
                loops[name].step(timed=True)
    return {name: loops[name].result() for name in SIDES}


if __name__ == "__main__":
    out, argument = sys.argv[1:]
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(Load(**json.loads(argument)), Path(scratch))
    Path(out).write_text(json.dumps(result))
