"""Drive one engine in this process: give it each case's requests, and keep the outputs.

    python -m bench.engines.driver OUT --rows NAME... --size SIZE [--output N] [--model DIR]
                                   [--round N | --kept ENGINES]

The probe, which every side loads as the same plugin, records the steps. OUT gets JSON, in which
each case says from when to when it ran, on the probe's clock. With --kept the driver is one of so
many on the device, and measures each time that it is asked to; see :mod:`bench.engines.turns`.
"""

from __future__ import annotations

import argparse
import gc
import json
import operator
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from demo import model

from bench import grammars, thinking
from bench.compare import clock, disturbance, outputs
from bench.engines import prompts, turns, workers
from bench.engines.arguments import GENERATED, arguments
from bench.engines.foreign_copies import ForeignCopies
from bench.engines.interference import Interference
from bench.engines.prompts import Place
from bench.engines.rows import BASELINE, ROWS, Case, Row
from bench.engines.rows import Engine as Spec
from bench.engines.slices import Baton, Slices

#: Prompts are drawn from the tokens of this text where there is a tokenizer.
TEXT = "The quick brown fox jumps over the lazy dog, and then it asks what comes next. "


@dataclass
class Completion:
    """The tokens of one request, and the logprobs of each position, if it asked for them."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Mapping[int, Any]] = field(default_factory=list)


class Engine:
    """An engine, and the outputs of its baseline.

    Args:
        spec: the engine to make.
        home: directory for a generated model.
        path: a model with weights and a tokenizer, in place of the generated one.
        sharing: number of engines that share the device's memory.

    Attributes:
        asynchronous: whether it schedules asynchronously.
        stamps: for each step with outputs, when they came (``time.perf_counter_ns``), and for
            how many requests.
        baseline: token ids of each request in the baseline case, for bad words to forbid.
        slices: where other processes run by turns with this one.
    """

    def __init__(self, spec: Spec, home: Path, path: str | None = None, sharing: int = 1) -> None:
        from vllm.v1.engine.llm_engine import LLMEngine

        self.spec = spec
        engine_args = arguments(
            path or model.write(home, **spec.model),
            spec.batch,
            spec.length,
            {max(1, spec.batch // 4), spec.batch},
            **({} if path else GENERATED),
            # Every prompt in the first step: what follows is decoding alone.
            max_num_batched_tokens=max(spec.batch * spec.prompt, spec.length),
            gpu_memory_utilization=0.6 / sharing,
            async_scheduling=spec.asynchronous,
            tensor_parallel_size=spec.tensor_parallel,
            reasoning_config=thinking.config() if spec.thinking else None,
        )
        self._engine = LLMEngine.from_engine_args(engine_args)
        config = self._engine.vllm_config
        self.asynchronous: bool = config.scheduler_config.async_scheduling
        self._vocabulary: int = config.model_config.get_vocab_size()
        self._text: list[int] = []
        if path:
            tokenizer = self._engine.get_tokenizer()
            self._text = tokenizer.encode(TEXT, add_special_tokens=False)
        self.stamps: list[tuple[int, int]] = []
        self.baseline: list[list[int]] = []
        self.slices: Slices | None = None
        core = self._engine.engine_core
        get_output = core.get_output

        def stamped() -> object:
            result = get_output()
            if result.outputs:
                self.stamps.append((time.perf_counter_ns(), len(result.outputs)))
            return result

        core.get_output = stamped

    def prompts(self, place: Place, count: int) -> list[list[int]]:
        """Return the token ids of each request's prompt."""
        spec = self.spec
        drawn = prompts.draw(place, count, spec.prompt, self._vocabulary, self._text)
        if spec.thinking:
            for prompt in drawn:
                prompt[-len(thinking.START) :] = thinking.START
        return drawn

    def generate(
        self,
        row: Row,
        case: Case,
        length: int,
        given: Sequence[Sequence[int]],
        slices: Slices | None = None,
    ) -> list[Completion]:
        """Run a case's batch, greedily by default; return the completions in order.

        Args:
            row: gives the thinking budgets.
            case: gives the sampling parameters.
            length: tokens that each request generates.
            given: the prompts.
            slices: told of each step.
        """
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        kind = RequestOutputKind.DELTA if case.streamed else RequestOutputKind.FINAL_ONLY
        for request, tokens in enumerate(given):
            parameters = dict(case.parameters_of(request))
            lengths = parameters.pop("bad_words", None)
            if parameters.pop("grammar", False):
                parameters["structured_outputs"] = grammars.params()
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
                # vLLM makes tokens of words by a tokenizer, and there may be none.
                sampling._bad_words_token_ids = words(self.baseline[request], lengths)
            prompt = TokensPrompt(prompt_token_ids=list(tokens))
            self._engine.add_request(str(request), prompt, sampling)
        self.stamps.clear()
        completions = [Completion() for _ in given]
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                piece, whole = output.outputs[0], completions[int(output.request_id)]
                whole.token_ids += piece.token_ids
                whole.logprobs += piece.logprobs or ()
            if slices is not None and self._engine.has_unfinished_requests():
                slices.step()
        return completions

    def allow_grammars(self) -> None:
        """Let requests have the grammar of :mod:`bench.grammars`."""
        grammars.install(self._engine, self._vocabulary)

    def reseed(self) -> None:
        """Seed the draws of requests without a seed, so that they do not depend on the past."""
        self._engine.collective_rpc(workers.reseed)

    def synchronize(self) -> None:
        """Wait for the devices, in each worker's process."""
        self._engine.collective_rpc(workers.synchronize)

    def bind_workers(self) -> list[int]:
        """Let workers end with this process, also while stopped; return the ids of theirs."""
        processes = self._engine.collective_rpc(workers.end_with_parent)
        return [process for process in processes if process != os.getpid()]

    def write_records(self, name: str) -> None:
        """Have the probe write what it has recorded so far.

        Args:
            name: the value of VLLM_READINESS_PROBE.
        """
        files = [Path(f"{name}.rank{rank}") for rank in range(self.spec.tensor_parallel)]
        for file in files:
            file.unlink(missing_ok=True)
        self._engine.collective_rpc(workers.request_records)
        while not all(file.exists() for file in files):
            time.sleep(0.01)


def words(tokens: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Cut tokens into words of these lengths."""
    ends = list(accumulate(lengths))
    return [list(tokens[end - length : end]) for end, length in zip(ends, lengths, strict=True)]


def start(
    rows: Sequence[Row], path: str | None, home: Path, sharing: int = 1
) -> tuple[Engine, Callable[[int], dict[str, Any]]]:
    """Start the engine of some rows.

    Args:
        rows: of one engine.
        path: a model's directory, or None for a generated one.
        home: directory for a generated model.
        sharing: number of engines that share the device's memory.

    Returns:
        The engine, and a function that measures every case of the rows in a round.
    """
    interference = Interference()
    interference.install()
    engine = Engine(rows[0].engine, home, path, sharing)
    if any(case.asks_for("grammar") for row in rows for case in row.cases.values()):
        engine.allow_grammars()

    import torch

    gpu = torch.cuda.is_available()

    def measure(number: int) -> dict[str, Any]:
        results = {
            row.name: {
                name: _case(engine, row, Place(number, row.name, name), interference, gpu)
                for name in row.cases
            }
            for row in rows
        }
        return {
            "device": torch.cuda.get_device_name() if gpu else "CPU",
            "scheduling": "async" if engine.asynchronous else "sync",
            "runner": interference.runner,
            "rows": results,
        }

    return engine, measure


def _case(
    engine: Engine, row: Row, place: Place, interference: Interference, gpu: bool
) -> dict[str, Any]:
    """Warm a case up and run it; return its times, outputs, counts and problems."""
    case = row.cases[place.case]
    batch = case.batch or engine.spec.batch
    # Bad words are cut from what the baseline returned for the same prompts.
    source = place._replace(case=BASELINE) if case.asks_for("bad_words") else place
    given = engine.prompts(source, batch)
    interference.consume = case.consumed
    engine.generate(row, case, row.warmup, engine.prompts(place._replace(warmup=True), batch))
    gc.collect()
    foreign = ForeignCopies() if gpu and case.beside else None
    engine.reseed()
    interference.foreign = foreign
    if engine.slices is not None:
        engine.slices.begin()
    before = disturbance.snapshot()
    with clock.told(json.dumps(place)) as telling:
        began = time.perf_counter_ns()
        completions = engine.generate(row, case, row.output, given, engine.slices)
        ended = time.perf_counter_ns()
    # What happened while other processes had their turn disturbed them, and not this one.
    looks = [before, *(engine.slices.looks if engine.slices else ()), disturbance.snapshot()]
    disturbed = disturbance.during(*zip(looks[::2], looks[1::2], strict=True))
    disturbed["gpus"] = disturbance.gpus() if gpu else None
    interference.foreign, interference.consume = None, False

    if case == row.cases[BASELINE]:
        engine.baseline = [one.token_ids for one in completions]
    counts = {
        "tokens": [sum(len(one.token_ids) for one in completions), batch * row.output],
        **_count_logprobs(row, case, completions, batch),
        **_count_effects(engine, row, case, completions),
    }
    problems = []
    stamps = list(engine.stamps)
    if [size for _, size in stamps] != [batch] * row.output and not case.streamed:
        problems.append(f"{len(stamps)} steps, not {row.output} of {batch} tokens each")
    if gpu and engine.asynchronous != row.engine.asynchronous:
        problems.append(f"async scheduling is {'on' if engine.asynchronous else 'off'}")
    return {
        "window": [began, ended],
        "longest": telling.longest,
        "stamps": [stamp for stamp, _ in stamps],
        "pauses": engine.slices.pauses if engine.slices else [],
        "copies": foreign.finish() if foreign else None,
        "disturbance": disturbed,
        "counts": counts,
        "problems": problems,
        "prompts": prompts.digest(given),
        **_packed(completions),
        "quiet": _quiet(engine, row, case, given) if case.beside else None,
    }


def _quiet(engine: Engine, row: Row, case: Case, given: Sequence[Sequence[int]]) -> dict[str, str]:
    """Return what the same prompts give without copies beside them; it is not timed."""
    engine.reseed()
    return _packed(engine.generate(row, replace(case, beside=False), row.output, given))


def _packed(completions: Sequence[Completion]) -> dict[str, str]:
    """Return the tokens and logprobs of requests, packed."""
    tokens = [[str(token) for token in one.token_ids] for one in completions]
    logprobs = [[_line(position) for position in one.logprobs] for one in completions]
    return {"tokens": outputs.pack(tokens), "logprobs": outputs.pack(logprobs)}


def _count_logprobs(
    row: Row, case: Case, completions: Sequence[Completion], batch: int
) -> dict[str, list[int]]:
    """Return received and expected counts of positions with logprobs, and with all of them."""
    received = complete = 0
    for request, one in enumerate(completions):
        received += len(one.logprobs)
        if (top := case.parameters_of(request).get("logprobs")) is not None:
            ranks = set(range(1, top + 1))
            for token, logprobs in zip(one.token_ids, one.logprobs, strict=False):
                complete += token in logprobs and ranks <= {lp.rank for lp in logprobs.values()}
    asking = sum("logprobs" in case.parameters_of(request) for request in range(batch))
    expected = asking * row.output
    return {"logprobs": [received, expected], "positions with every logprob": [complete, expected]}


def _count_effects(
    engine: Engine, row: Row, case: Case, completions: Sequence[Completion]
) -> dict[str, list[int]]:
    """Return how many requests felt their bad words and budgets, and how many should have."""
    counts = {}
    batch = case.batch or engine.spec.batch
    tokens = [one.token_ids for one in completions]
    if case.asks_for("bad_words"):
        changed = sum(map(operator.ne, tokens, engine.baseline))
        counts["requests that met a bad word"] = [changed, batch]
    if case.asks_for("thinking_token_budget"):
        budgets = [row.budget(case.parameters_of(request)) for request in range(batch)]
        last = [b for b in budgets if b is not None and b + len(thinking.END) <= row.output]
        ended = sum(map(thinking.ended, tokens))
        counts["requests that used up their budget"] = [ended, len(last)]
    return counts


def _line(logprobs: Mapping[int, Any]) -> str:
    return " ".join(f"{t}:{lp.rank}:{lp.logprob!r}" for t, lp in logprobs.items()) or "none"


def main(argv: Sequence[str]) -> None:
    """Measure the rows that are named, once or each time that it is asked for."""
    parser = argparse.ArgumentParser(prog="bench.engines.driver")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", nargs="+", required=True, choices=list(ROWS))
    parser.add_argument("--size", required=True)
    parser.add_argument("--output", type=int)
    parser.add_argument("--model")
    parser.add_argument("--round", type=int, default=1)
    parser.add_argument("--kept", type=int)
    parser.add_argument("--baton", type=Path)
    parser.add_argument("--place", type=int)
    args = parser.parse_args(argv)
    rows = [ROWS[name].sized(args.size, args.output) for name in args.rows]
    engine, measure = start(rows, args.model, args.out.with_suffix(".model"), args.kept or 1)
    if args.kept is None:
        args.out.write_text(json.dumps(measure(args.round)))
        return
    baton = Baton(args.baton)
    processes = engine.bind_workers()
    slices = Slices(baton, args.place, rows[0].slice, engine.synchronize, processes)
    engine.slices = slices
    turns.ready(args.out)
    for number, path in enumerate(turns.asked(args.out), 1):
        slices.wait()
        result = measure(number)
        engine.write_records(os.environ["VLLM_READINESS_PROBE"])
        slices.leave()
        turns.answer(path, result)


if __name__ == "__main__":
    main(sys.argv[1:])
