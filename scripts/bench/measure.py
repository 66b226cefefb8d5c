"""One engine, driven in a process of its own.

What happens inside a step is recorded by the probe, which every side runs as the same
plugin. Here requests are given to the engine, and their outputs kept; each case says from
when to when it ran, on the probe's clock.
"""

from __future__ import annotations

import functools
import gc
import json
import platform
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from itertools import accumulate, cycle, islice
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

from bench import outputs, thinking
from bench.readback import Foreign
from bench.rows import BASELINE, Case, Row
from bench.rows import Engine as Spec
from demo import model

_P = ParamSpec("_P")
_R = TypeVar("_R")

#: What prompts are made of where there is a tokenizer.
TEXT = "The quick brown fox jumps over the lazy dog, and then it asks what comes next. "


class Completion(Protocol):
    """What the engine hands out for one request, as far as it is looked at here."""

    token_ids: Sequence[int]
    logprobs: Sequence[Mapping[int, Any]] | None


class Interference:
    """What is done to an engine's steps from outside, in some of the cases.

    Attributes:
        foreign: copies to launch as steps begin; None for none.
        begun: of each step since they were set, when it began, and whether beside a copy.
        consume: whether each output is waited for as soon as it is made.
        runner: the version of the model runner that runs; None: in another process.
    """

    def __init__(self) -> None:
        self.runner: int | None = None
        self.foreign: Foreign | None = None
        self.begun: list[tuple[int, bool]] = []
        self.consume = False

    def install(self) -> None:
        """Wrap what is interfered with. Call it before an engine is made, and once."""
        for version in (1, 2):
            runner, output = _runner(version)
            runner.execute_model = self._begun(runner.execute_model, version)
            runner.sample_tokens = _told(runner.sample_tokens)
            output.__init__ = self._consumed(output.__init__)
            output.get_output = _kept(output.get_output)

    def _begun(self, function: Callable[_P, _R], version: int) -> Callable[_P, _R]:
        @functools.wraps(function)
        def begun(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            self.runner = version
            if self.foreign is not None:
                beside = self.foreign.step()
                self.begun.append((time.perf_counter_ns(), beside))
            return function(*args, **kwargs)

        return begun

    def _consumed(self, function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def made(output: Any, *args: Any, **kwargs: Any) -> None:
            function(output, *args, **kwargs)
            if self.consume:
                # What the runner still looks at afterwards is put back.
                before = dict(vars(output))
                early = output.get_output()
                vars(output).update({**before, "_early": early})

        return made


def _kept(function: Callable[[Any], Any]) -> Callable[[Any], object]:
    """Hand out what has been consumed already."""

    @functools.wraps(function)
    def get_output(output: Any) -> object:
        early = vars(output).pop("_early", None)
        return function(output) if early is None else early

    return get_output


def _told(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Print an exception at once: the executor keeps it, and the next step fails of it."""

    @functools.wraps(function)
    def told(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except Exception:
            traceback.print_exc()
            raise

    return told


def _runner(version: int) -> tuple[Any, Any]:
    """The classes of a model runner, and of what it hands out when it does so later."""
    if version == 1:
        one = import_module("vllm.v1.worker.gpu_model_runner")
        return one.GPUModelRunner, one.AsyncGPUModelRunnerOutput
    two = import_module("vllm.v1.worker.gpu.model_runner")
    return two.GPUModelRunner, import_module("vllm.v1.worker.gpu.async_utils").AsyncOutput


class Engine:
    """An engine, and what it gave.

    Args:
        spec: which engine.
        home: directory for a generated model.
        path: of a model with weights and a tokenizer, in place of the generated one.

    Attributes:
        asynchronous: whether it schedules asynchronously.
        stamps: of each step that gave something, when it did (nanoseconds of
            ``time.perf_counter_ns``), and to how many requests.
        plain: what each request gave in the baseline case, for bad words to forbid.
    """

    def __init__(self, spec: Spec, home: Path, path: str | None = None) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self.spec = spec
        own: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
        arguments = EngineArgs(
            model=path or str(model.write(home, **spec.model)),
            **({} if path else own),
            seed=0,
            max_model_len=spec.length,
            max_num_seqs=spec.batch,
            # Every prompt in the first step: what follows is decoding alone.
            max_num_batched_tokens=max(spec.batch * spec.prompt, spec.length),
            enable_prefix_caching=False,
            gpu_memory_utilization=0.6,
            async_scheduling=spec.asynchronous,
            disable_log_stats=True,
            reasoning_config=thinking.config() if spec.thinking else None,
            compilation_config={
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": sorted({max(1, spec.batch // 4), spec.batch}),
            },
        )
        self._engine = LLMEngine.from_engine_args(arguments)
        config = self._engine.vllm_config
        self.asynchronous: bool = config.scheduler_config.async_scheduling
        self._vocabulary: int = config.model_config.get_vocab_size()
        self._text: list[int] = []
        if path:
            tokenizer = self._engine.get_tokenizer()
            self._text = tokenizer.encode(TEXT, add_special_tokens=False)
        self.stamps: list[tuple[int, int]] = []
        self.plain: list[list[int]] = []
        core = self._engine.engine_core
        core.get_output = self._stamped(core.get_output)

    def prompt(self, request: int) -> list[int]:
        """A request's prompt: token ids, and as many of them as the engine's say."""
        spec, start = self.spec, request * self.spec.prompt
        if self._text:
            begin = request % len(self._text)
            prompt = list(islice(cycle(self._text), begin, begin + spec.prompt))
        else:
            places = range(start, start + spec.prompt)
            prompt = [3 + 7919 * k % (self._vocabulary - 3) for k in places]
        if spec.thinking:
            prompt[-len(thinking.START) :] = thinking.START
        return prompt

    def generate(self, row: Row, case: Case, length: int) -> list[Completion]:
        """Run a case's batch, greedily if not asked otherwise; the completions, in order."""
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        kind = RequestOutputKind.DELTA if case.streamed else RequestOutputKind.FINAL_ONLY
        for request in range(case.batch or self.spec.batch):
            parameters = dict(case.of(request))
            lengths = parameters.pop("bad_words", None)
            if (budget := row.budget(parameters)) is not None:
                parameters["thinking_token_budget"] = budget
            sampling = SamplingParams(
                max_tokens=length,
                ignore_eos=True,
                detokenize=False,
                output_kind=kind,
                **{"temperature": 0.0, **parameters},
            )
            if lengths:
                # Words are turned to tokens by a tokenizer, and there need not be one.
                sampling._bad_words_token_ids = words(self.plain[request], lengths)
            prompt = TokensPrompt(prompt_token_ids=self.prompt(request))
            self._engine.add_request(str(request), prompt, sampling)
        self.stamps.clear()
        pieces: dict[int, list[Completion]] = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                pieces.setdefault(int(output.request_id), []).append(output.outputs[0])
        return [_whole_of(pieces[request]) for request in sorted(pieces)]

    def _stamped(self, function: Callable[[], Any]) -> Callable[[], object]:
        def stamped() -> object:
            result = function()
            if result.outputs:
                self.stamps.append((time.perf_counter_ns(), len(result.outputs)))
            return result

        return stamped


class _Joined:
    """The pieces of a streamed completion, joined."""

    def __init__(self, pieces: Sequence[Completion]) -> None:
        self.token_ids: Sequence[int] = [token for piece in pieces for token in piece.token_ids]
        given = [piece.logprobs for piece in pieces if piece.logprobs is not None]
        joined = [at for positions in given for at in positions]
        self.logprobs: Sequence[Mapping[int, Any]] | None = joined or None


def _whole_of(pieces: Sequence[Completion]) -> Completion:
    return pieces[0] if len(pieces) == 1 else _Joined(pieces)


def words(tokens: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Words of these lengths: the tokens one after the other."""
    ends = list(accumulate(lengths))
    return [list(tokens[end - length : end]) for end, length in zip(ends, lengths, strict=True)]


def main(rows: Sequence[Row], out: Path, path: str | None, done: Callable[[str], None]) -> None:
    """Measure every case of rows of one engine, and write what was seen to ``out``.

    Args:
        rows: all of one engine.
        out: gets JSON.
        path: of a model, or None for the generated one.
        done: told of each case that is done.
    """
    start = time.perf_counter()
    interference = Interference()
    interference.install()
    engine = Engine(rows[0].engine, out.with_suffix(".model"), path)

    import torch
    import vllm

    gpu = torch.cuda.is_available()
    ready = time.perf_counter() - start
    done("engine")
    found: dict[str, Any] = {}
    for row in rows:
        found[row.name] = cases = {}
        for name, case in row.cases.items():
            cases[name] = _case(engine, row, case, interference, gpu)
            done(name)
    result = {
        "engine": rows[0].engine.name,
        "device": torch.cuda.get_device_name() if gpu else "CPU",
        "package": str(Path(vllm.__file__).parent),
        "python": platform.python_version(),
        "async scheduling": engine.asynchronous,
        "runner": interference.runner,
        "startup s": ready,
        "rows": found,
    }
    out.write_text(json.dumps(result))


def _case(
    engine: Engine, row: Row, case: Case, interference: Interference, gpu: bool
) -> dict[str, Any]:
    interference.consume = case.consumed
    engine.generate(row, replace(case, beside=None), row.warmup)
    gc.collect()
    foreign = Foreign(case.beside) if gpu and case.beside else None
    interference.begun.clear()
    interference.foreign = foreign
    began = time.perf_counter_ns()
    completions = engine.generate(row, case, row.output)
    ended = time.perf_counter_ns()
    interference.foreign, interference.consume = None, False

    tokens = [[str(token) for token in done.token_ids] for done in completions]
    logprobs = [[_line(at) for at in done.logprobs or ()] for done in completions]
    if case == row.cases[BASELINE]:
        engine.plain = [list(done.token_ids) for done in completions]
    batch = case.batch or engine.spec.batch
    counts = {
        "tokens": [sum(map(len, tokens)), batch * row.output],
        **_counted(row, case, completions, batch),
        **_met(engine, row, case, completions),
    }
    problems = [f"{n} of {m} {kind}" for kind, (n, m) in counts.items() if n != m]
    if [size for _, size in engine.stamps] != [batch] * row.output and not case.streamed:
        problems.append(f"{len(engine.stamps)} steps, not {row.output} of {batch} tokens each")
    if gpu and engine.asynchronous != row.engine.asynchronous:
        problems.append(f"async scheduling is {'on' if engine.asynchronous else 'off'}")
    return {
        "window": [began, ended],
        "stamps": [at for at, _ in engine.stamps],
        "beside": list(interference.begun) if foreign else None,
        "copies": foreign.finish() if foreign else None,
        "counts": counts,
        "problems": problems,
        "sha256": {"tokens": outputs.digest(tokens), "logprobs": outputs.digest(logprobs)},
        "tokens": outputs.pack(tokens),
        "logprobs": outputs.pack(logprobs),
    }


def _counted(
    row: Row, case: Case, completions: Sequence[Completion], batch: int
) -> dict[str, list[int]]:
    """Positions that have logprobs, and those that have all of them; and how many should."""
    seen = whole = wanted = 0
    for request, done in enumerate(completions):
        given = done.logprobs or ()
        seen += len(given)
        if (top := case.of(request).get("logprobs")) is not None:
            whole += _whole(done, top)
    for request in range(batch):
        wanted += row.output if "logprobs" in case.of(request) else 0
    return {"logprobs": [seen, wanted], "positions with every logprob": [whole, wanted]}


def _met(
    engine: Engine, row: Row, case: Case, completions: Sequence[Completion]
) -> dict[str, list[int]]:
    """How many requests met what their parameters are there for, and how many should have."""
    met = {}
    batch = case.batch or engine.spec.batch
    given = [list(done.token_ids) for done in completions]
    if case.asks_for("bad_words"):
        changed = sum(tokens != plain for tokens, plain in zip(given, engine.plain, strict=True))
        met["requests that met a bad word"] = [changed, batch]
    if case.asks_for("thinking_token_budget"):
        ended = sum(map(thinking.ended, given))
        budgets = [row.budget(case.of(request)) for request in range(batch)]
        last = [b for b in budgets if b is not None and b + len(thinking.END) <= row.output]
        met["requests that used up their budget"] = [ended, len(last)]
    return met


def _line(at: Mapping[int, Any]) -> str:
    return " ".join(f"{token}:{lp.rank}:{lp.logprob!r}" for token, lp in at.items()) or "none"


def _whole(done: Completion, top: int) -> int:
    """How many positions have a logprob for the token taken and for each of the top ranks."""
    ranks = set(range(1, top + 1))
    pairs = zip(done.token_ids, done.logprobs or (), strict=False)
    return sum(token in at and ranks <= {lp.rank for lp in at.values()} for token, at in pairs)
