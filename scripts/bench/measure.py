"""One engine, measured from inside its own process.

The engine runs in this process where the platform lets it (on a GPU it does), so that
the step's functions can be timed by wrapping them. The CPU platform puts its worker into
another process; what happens there is then not seen, and the figures say so.
"""

from __future__ import annotations

import functools
import gc
import json
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

from bench import outputs
from bench.rows import Row
from demo import model

TIMED = ("execute_model", "sample_tokens", "get_output")
LAST = 32

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Completion(Protocol):
    """What the engine hands out for one request, as far as it is looked at here."""

    token_ids: Sequence[int]
    logprobs: Sequence[Mapping[int, Any]] | None


class Watch:
    """Times the step's functions, and the waits on events inside ``sample_tokens``.

    Attributes:
        seconds: function name to the length of each call.
        waits: for each ``sample_tokens``, how often it waited on an event.
        waited: for each ``sample_tokens``, the seconds that it waited.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {name: [] for name in TIMED}
        self.waits: list[int] = []
        self.waited: list[float] = []
        self._sampling = False

    def install(self) -> None:
        """Wrap what is timed. Call it before an engine is made, and once."""
        import vllm  # noqa: F401  (sets up what torch reads when it is imported)

        # isort: split
        import torch

        # torch.Event is a C type whose attributes are fixed: a subclass takes its name.
        wait = {"synchronize": self._counted(torch.Event.synchronize)}
        torch.Event = type("Event", (torch.Event,), wait)
        torch.cuda.Event.synchronize = self._counted(torch.cuda.Event.synchronize)

        from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput, GPUModelRunner

        GPUModelRunner.execute_model = self._timed(GPUModelRunner.execute_model)
        GPUModelRunner.sample_tokens = self._sampled(self._timed(GPUModelRunner.sample_tokens))
        AsyncGPUModelRunnerOutput.get_output = self._timed(AsyncGPUModelRunnerOutput.get_output)

    def clear(self) -> None:
        """Forget what was seen so far."""
        for seconds in self.seconds.values():
            seconds.clear()
        self.waits.clear()
        self.waited.clear()

    def _timed(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        seconds = self.seconds[function.__name__]

        @functools.wraps(function)
        def timed(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            seconds.append(time.perf_counter() - start)
            return result

        return timed

    def _sampled(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def sampled(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            self.waits.append(0)
            self.waited.append(0.0)
            self._sampling = True
            try:
                return function(*args, **kwargs)
            except Exception:
                # The executor keeps it for later, and the next step fails of it first.
                traceback.print_exc()
                raise
            finally:
                self._sampling = False

        return sampled

    def _counted(self, function: Callable[[object], None]) -> Callable[[object], None]:
        @functools.wraps(function)
        def counted(event: object) -> None:
            start = time.perf_counter()
            function(event)
            if self._sampling:
                self.waits[-1] += 1
                self.waited[-1] += time.perf_counter() - start

        return counted


class Engine:
    """A row's engine.

    Attributes:
        asynchronous: whether it schedules asynchronously.
        stamps: of each step that gave something, when it did, and to how many requests.
    """

    def __init__(self, row: Row, home: Path) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self.row = row
        arguments = EngineArgs(
            model=str(model.write(home, **row.model)),
            load_format="dummy",
            skip_tokenizer_init=True,
            seed=0,
            max_model_len=row.length,
            max_num_seqs=row.batch,
            # Every prompt in the first step: what follows is decoding alone.
            max_num_batched_tokens=max(row.batch * row.prompt, row.length),
            enable_prefix_caching=False,
            gpu_memory_utilization=0.6,
            async_scheduling=True,
            disable_log_stats=True,
            compilation_config={
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [row.batch],
            },
        )
        self._engine = LLMEngine.from_engine_args(arguments)
        config = self._engine.vllm_config
        self.asynchronous: bool = config.scheduler_config.async_scheduling
        self._vocabulary: int = config.model_config.get_vocab_size()
        self.stamps: list[tuple[float, int]] = []
        core = self._engine.engine_core
        core.get_output = self._stamped(core.get_output)

    def generate(self, parameters: Mapping[str, Any], length: int) -> list[Completion]:
        """Run the row's batch, greedily; each request's completion, in order."""
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        for request in range(self.row.batch):
            start = request * self.row.prompt
            prompt = [
                3 + 7919 * k % (self._vocabulary - 3) for k in range(start, start + self.row.prompt)
            ]
            sampling = SamplingParams(
                temperature=0.0,
                max_tokens=length,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                **parameters,
            )
            self._engine.add_request(str(request), TokensPrompt(prompt_token_ids=prompt), sampling)
        self.stamps.clear()
        completions: dict[int, Completion] = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                completions[int(output.request_id)] = output.outputs[0]
        return [completions[request] for request in sorted(completions)]

    def _stamped(self, function: Callable[[], Any]) -> Callable[[], object]:
        def stamped() -> object:
            result = function()
            if result.outputs:
                self.stamps.append((time.perf_counter(), len(result.outputs)))
            return result

        return stamped


def main(row: Row, out: Path) -> None:
    """Measure every case of ``row`` in one engine, and write what was seen to ``out``."""
    start = time.perf_counter()
    watch = Watch()
    watch.install()
    engine = Engine(row, out.with_suffix(".model"))

    import torch
    import vllm

    gpu = torch.cuda.is_available()
    result = {
        "row": row.name,
        "device": torch.cuda.get_device_name() if gpu else "CPU",
        "torch": torch.__version__,
        "vllm": vllm.__version__,
        "package": str(Path(vllm.__file__).parent),
        "async scheduling": engine.asynchronous,
        "startup s": time.perf_counter() - start,
        "cases": {
            name: _case(engine, watch, parameters, gpu) for name, parameters in row.cases.items()
        },
    }
    out.write_text(json.dumps(result))


def _case(engine: Engine, watch: Watch, parameters: Mapping[str, Any], gpu: bool) -> dict[str, Any]:
    row = engine.row
    engine.generate(parameters, row.warmup)
    gc.collect()
    watch.clear()
    before = _fences()
    start = time.perf_counter()
    completions = engine.generate(parameters, row.output)
    seconds = time.perf_counter() - start
    fences = {owner: count - before.get(owner, 0) for owner, count in _fences().items()}

    tokens = [[str(token) for token in done.token_ids] for done in completions]
    logprobs = [[_line(at) for at in done.logprobs or ()] for done in completions]
    wanted = row.batch * row.output
    top = parameters.get("logprobs", 0)
    counts = {
        "tokens": [sum(map(len, tokens)), wanted],
        "logprobs": [sum(_whole(done, top) for done in completions), wanted if top else 0],
    }
    problems = [f"{n} of {m} {kind}" for kind, (n, m) in counts.items() if n != m]
    if [size for _, size in engine.stamps] != [row.batch] * row.output:
        problems.append(f"{len(engine.stamps)} steps, not {row.output} of {row.batch} tokens each")
    # Where the worker is another process, as on a CPU, nothing is seen of it.
    if missing := [name for name in TIMED if len(watch.seconds[name]) < row.output]:
        missing = missing if gpu else [name for name in missing if watch.seconds[name]]
        problems += [f"{name} was seen {len(watch.seconds[name])} times" for name in missing]
    if gpu and not engine.asynchronous:
        problems.append("async scheduling is off")
    return {
        "figures": _figures(engine, watch, seconds, counts["tokens"][0]),
        "fences": fences,
        "counts": counts,
        "problems": problems,
        "sha256": {"tokens": outputs.digest(tokens), "logprobs": outputs.digest(logprobs)},
        "tokens": outputs.pack(tokens),
        "logprobs": outputs.pack(logprobs),
    }


def _figures(engine: Engine, watch: Watch, seconds: float, tokens: int) -> dict[str, float | None]:
    """The figures by name; milliseconds unless the name says otherwise, None if not seen."""
    times = [at for at, _ in engine.stamps]
    steps = [after - before for before, after in pairwise(times)]
    # The first call is the prompts', and any after the last token has nothing to do.
    decode = slice(1, engine.row.output)
    figures: dict[str, float | None] = {
        "tokens/s": tokens / seconds,
        "ITL p50": _percentile(steps, 50),
        "ITL p99": _percentile(steps, 99),
        f"ITL p50 of the last {LAST} steps": _percentile(steps[-LAST:], 50),
    }
    for name, calls in watch.seconds.items():
        figures[f"{name} p50"] = _percentile(calls[decode], 50)
        figures[f"{name} p99"] = _percentile(calls[decode], 99)
    waits, waited = watch.waits[decode], watch.waited[decode]
    figures["waits in sample_tokens, a step"] = statistics.fmean(waits) if waits else None
    figures["waited in sample_tokens, a step"] = statistics.fmean(waited) * 1e3 if waited else None
    return figures


def _percentile(seconds: Sequence[float], percent: int) -> float | None:
    """In milliseconds."""
    if len(seconds) < 2:
        return None
    return statistics.quantiles(seconds, n=100, method="inclusive")[percent - 1] * 1e3


def _line(at: Mapping[int, Any]) -> str:
    return " ".join(f"{token}:{lp.rank}:{lp.logprob!r}" for token, lp in at.items()) or "none"


def _whole(done: Completion, top: int) -> int:
    """How many positions have a logprob for the token taken and for each of the top ranks."""
    ranks = set(range(1, top + 1))
    pairs = zip(done.token_ids, done.logprobs or (), strict=False)
    return sum(token in at and ranks <= {lp.rank for lp in at.values()} for token, at in pairs)


def _fences() -> dict[str, int]:
    """Fences so far by owner; none where the overlay is not there or does not count them."""
    name = "vllm.v1.readiness.fences"
    try:
        return dict(import_module(name).counts())
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        return {}
