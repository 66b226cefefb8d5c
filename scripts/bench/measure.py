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
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

from bench import outputs, thinking
from bench.readback import Foreign
from bench.rows import BASELINE, Row
from demo import model

TIMED = ("execute_model", "sample_tokens", "get_output")
LAST = 32
#: Of steps begun beside a foreign copy, so many at least make a figure.
FEWEST = 8

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Completion(Protocol):
    """What the engine hands out for one request, as far as it is looked at here."""

    token_ids: Sequence[int]
    logprobs: Sequence[Mapping[int, Any]] | None


@dataclass
class Step:
    """One step, from the beginning of ``execute_model`` to the beginning of the next.

    Attributes:
        start: when it began.
        beside: whether a foreign copy was running then.
        waiting: seconds in ``sample_tokens`` and ``get_output``, all that can wait for a copy.
        events: of these, seconds of waiting on events.
    """

    start: float
    beside: bool
    waiting: float = 0.0
    events: float = 0.0


class Watch:
    """Times the step's functions, and the waits on events inside ``sample_tokens``.

    Attributes:
        seconds: function name to the length of each call.
        waits: for each ``sample_tokens``, how often it waited on an event.
        waited: for each ``sample_tokens``, the seconds that it waited.
        steps: each step.
        foreign: copies to launch between steps; None for none.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {name: [] for name in TIMED}
        self.waits: list[int] = []
        self.waited: list[float] = []
        self.steps: list[Step] = []
        self.foreign: Foreign | None = None
        self._sampling = False
        self._handing_out = False

    def install(self) -> None:
        """Wrap what is timed. Call it before an engine is made, and once."""
        import vllm  # noqa: F401  (sets up what torch reads when it is imported)

        # isort: split
        import torch

        # torch.Event is a C type whose attributes are fixed: a subclass takes its name.
        wait = {"synchronize": self._counted(torch.Event.synchronize)}
        torch.Event = type("Event", (torch.Event,), wait)
        torch.cuda.Event.synchronize = self._counted(torch.cuda.Event.synchronize)

        for runner, output in (_runner(1), _runner(2)):
            runner.execute_model = self._begun(self._timed(runner.execute_model))
            runner.sample_tokens = self._sampled(self._timed(runner.sample_tokens))
            output.get_output = self._handed_out(self._timed(output.get_output))

    def clear(self) -> None:
        """Forget what was seen so far."""
        for seconds in self.seconds.values():
            seconds.clear()
        self.waits.clear()
        self.waited.clear()
        self.steps.clear()

    def _begun(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def begun(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            beside = self.foreign is not None and self.foreign.step()
            self.steps.append(Step(time.perf_counter(), beside))
            return function(*args, **kwargs)

        return begun

    def _timed(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        seconds = self.seconds[function.__name__]

        @functools.wraps(function)
        def timed(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            seconds.append(time.perf_counter() - start)
            if function.__name__ != "execute_model" and self.steps:
                self.steps[-1].waiting += seconds[-1]
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

    def _handed_out(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def handed_out(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            self._handing_out = True
            try:
                return function(*args, **kwargs)
            finally:
                self._handing_out = False

        return handed_out

    def _counted(self, function: Callable[[object], None]) -> Callable[[object], None]:
        @functools.wraps(function)
        def counted(event: object) -> None:
            start = time.perf_counter()
            function(event)
            seconds = time.perf_counter() - start
            if self._sampling:
                self.waits[-1] += 1
                self.waited[-1] += seconds
            if (self._sampling or self._handing_out) and self.steps:
                self.steps[-1].events += seconds

        return counted


def _runner(version: int) -> tuple[Any, Any]:
    """The classes of a model runner, and of what it hands out when it does so later."""
    if version == 1:
        one = import_module("vllm.v1.worker.gpu_model_runner")
        return one.GPUModelRunner, one.AsyncGPUModelRunnerOutput
    two = import_module("vllm.v1.worker.gpu.model_runner")
    return two.GPUModelRunner, two.AsyncOutput


class Engine:
    """A row's engine.

    Attributes:
        asynchronous: whether it schedules asynchronously.
        stamps: of each step that gave something, when it did, and to how many requests.
        plain: what each request gave in the baseline case, for bad words to forbid.
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
            async_scheduling=row.asynchronous,
            disable_log_stats=True,
            reasoning_config=thinking.config() if row.thinking else None,
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
        self.plain: list[list[int]] = []
        core = self._engine.engine_core
        core.get_output = self._stamped(core.get_output)

    def generate(self, parameters: Mapping[str, Any], length: int) -> list[Completion]:
        """Run the row's batch, greedily if not asked otherwise; the completions, in order."""
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        parameters = dict(parameters)
        lengths = parameters.pop("bad_words", None)
        for request in range(self.row.batch):
            start = request * self.row.prompt
            prompt = [
                3 + 7919 * k % (self._vocabulary - 3) for k in range(start, start + self.row.prompt)
            ]
            if self.row.thinking:
                prompt[-len(thinking.START) :] = thinking.START
            sampling = SamplingParams(
                max_tokens=length,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                **{"temperature": 0.0, **parameters},
            )
            if lengths:
                # Words are turned to tokens by a tokenizer, and there is none.
                sampling._bad_words_token_ids = words(self.plain[request], lengths)
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


def words(tokens: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Words of these lengths: the tokens one after the other."""
    ends = list(accumulate(lengths))
    return [list(tokens[end - length : end]) for end, length in zip(ends, lengths, strict=True)]


def main(row: Row, out: Path) -> None:
    """Measure every case of ``row`` in one engine, and write what was seen to ``out``."""
    start = time.perf_counter()
    watch = Watch()
    watch.install()
    engine = Engine(row, out.with_suffix(".model"))

    import torch
    import vllm

    gpu = torch.cuda.is_available()
    ready = time.perf_counter() - start
    cases = {}
    for name, parameters in row.cases.items():
        direction = row.beside.get(name)
        watch.foreign = Foreign(direction) if gpu and direction else None
        cases[name] = _case(engine, watch, parameters, gpu)
    for name in row.beside:
        cases[name]["problems"] += _parted(cases[name], cases[row.alone(name)], row.alone(name))
    result = {
        "row": row.name,
        "device": torch.cuda.get_device_name() if gpu else "CPU",
        "torch": torch.__version__,
        "vllm": vllm.__version__,
        "package": str(Path(vllm.__file__).parent),
        "async scheduling": engine.asynchronous,
        "startup s": ready,
        "cases": cases,
    }
    out.write_text(json.dumps(result))


def _case(engine: Engine, watch: Watch, parameters: Mapping[str, Any], gpu: bool) -> dict[str, Any]:
    row = engine.row
    foreign, watch.foreign = watch.foreign, None
    engine.generate(parameters, row.warmup)
    gc.collect()
    watch.clear()
    watch.foreign = foreign
    before = _fences()
    start = time.perf_counter()
    completions = engine.generate(parameters, row.output)
    seconds = time.perf_counter() - start
    watch.foreign = None
    fences = {owner: count - before.get(owner, 0) for owner, count in _fences().items()}

    tokens = [[str(token) for token in done.token_ids] for done in completions]
    logprobs = [[_line(at) for at in done.logprobs or ()] for done in completions]
    if parameters == row.cases[BASELINE]:
        engine.plain = [list(done.token_ids) for done in completions]
    wanted = row.batch * row.output
    top = parameters.get("logprobs", 0)
    counts = {
        "tokens": [sum(map(len, tokens)), wanted],
        "logprobs": [
            sum(_whole(done, top) for done in completions),
            wanted if "logprobs" in parameters else 0,
        ],
        **_met(engine, parameters, completions),
    }
    problems = [f"{n} of {m} {kind}" for kind, (n, m) in counts.items() if n != m]
    if [size for _, size in engine.stamps] != [row.batch] * row.output:
        problems.append(f"{len(engine.stamps)} steps, not {row.output} of {row.batch} tokens each")
    # Where the worker is another process, as on a CPU, nothing is seen of it.
    if missing := [name for name in _timed(engine) if len(watch.seconds[name]) < row.output]:
        missing = missing if gpu else [name for name in missing if watch.seconds[name]]
        problems += [f"{name} was seen {len(watch.seconds[name])} times" for name in missing]
    if gpu and engine.asynchronous != row.asynchronous:
        problems.append(f"async scheduling is {'on' if engine.asynchronous else 'off'}")
    figures = _figures(engine, watch, seconds, counts["tokens"][0])
    if foreign is not None:
        lengths = foreign.finish()
        figures |= beside(watch.steps[1 : row.output], lengths)
        problems += _unlike(watch.steps[1 : row.output], lengths)
    return {
        "figures": figures,
        "fences": fences,
        "counts": counts,
        "problems": problems,
        "sha256": {"tokens": outputs.digest(tokens), "logprobs": outputs.digest(logprobs)},
        "tokens": outputs.pack(tokens),
        "logprobs": outputs.pack(logprobs),
    }


def _met(
    engine: Engine, parameters: Mapping[str, Any], completions: Sequence[Completion]
) -> dict[str, list[int]]:
    """How many requests met what their parameters are there for, and how many should have."""
    row, met = engine.row, {}
    given = [list(done.token_ids) for done in completions]
    if "bad_words" in parameters:
        changed = sum(tokens != plain for tokens, plain in zip(given, engine.plain, strict=True))
        met["requests that met a bad word"] = [changed, row.batch]
    if "thinking_token_budget" in parameters:
        last = parameters["thinking_token_budget"] + len(thinking.END)
        ended = sum(map(thinking.ended, given))
        met["requests that used up their budget"] = [ended, row.batch if last <= row.output else 0]
    return met


def _timed(engine: Engine) -> Sequence[str]:
    """The functions that a step goes through."""
    return TIMED if engine.asynchronous else TIMED[:-1]


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
    for name in _timed(engine):
        calls = watch.seconds[name]
        figures[f"{name} p50"] = _percentile(calls[decode], 50)
        figures[f"{name} p99"] = _percentile(calls[decode], 99)
    waits, waited = watch.waits[decode], watch.waited[decode]
    figures["waits in sample_tokens, a step"] = statistics.fmean(waits) if waits else None
    figures["waited in sample_tokens, a step"] = statistics.fmean(waited) * 1e3 if waited else None
    return figures


def beside(steps: Sequence[Step], lengths: Sequence[float]) -> dict[str, float | None]:
    """Steps begun while a foreign copy was running, against the quiet ones of the same run.

    Args:
        steps: in their order, one after the other.
        lengths: of each foreign copy, in milliseconds.
    """
    figures: dict[str, float | None] = {
        "steps begun beside the copy": float(sum(step.beside for step in steps)),
        "copies": float(len(lengths)),
        "copy, shortest": min(lengths, default=None),
    }
    # The last step's end is not known.
    length = {id(step): after.start - step.start for step, after in pairwise(steps)}
    measures: dict[str, Callable[[Step], float]] = {
        "wait of a step": lambda step: step.waiting,
        "event waits of a step": lambda step: step.events,
        "step": lambda step: length[id(step)],
    }
    for name, measure in measures.items():
        quiet = [measure(step) for step in steps[:-1] if not step.beside]
        noisy = [measure(step) for step in steps[:-1] if step.beside]
        for percent in (50, 99, 100):
            one, other = _percentile(quiet, percent), _percentile(noisy, percent)
            label = "max" if percent == 100 else f"p{percent}"
            figures[f"{name}, quiet, {label}"] = one
            figures[f"{name}, beside the copy, {label}"] = other
            figures[f"{name}, beside / quiet, {label}"] = other / one if one and other else None
    return figures


def _unlike(steps: Sequence[Step], lengths: Sequence[float]) -> list[str]:
    """Why these steps do not show what a long copy does."""
    problems = []
    if (noisy := sum(step.beside for step in steps)) < FEWEST or len(steps) - noisy < FEWEST:
        problems.append(f"{noisy} of {len(steps)} steps began beside a copy")
    if (shortest := min(lengths, default=0.0)) < Foreign.LEAST * 1e3:
        problems.append(f"a copy took {shortest:.0f} ms")
    return problems


def _parted(case: Mapping[str, Any], alone: Mapping[str, Any], name: str) -> list[str]:
    """Where a case gave something else than the same requests gave without foreign copies."""
    return [
        f"{kind} differ from those of {name!r}"
        for kind, digest in case["sha256"].items()
        if digest != alone["sha256"][kind]
    ]


def _percentile(seconds: Sequence[float], percent: int) -> float | None:
    """In milliseconds."""
    if len(seconds) < 2:
        return None
    if percent == 100:
        return max(seconds) * 1e3
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
