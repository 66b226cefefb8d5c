"""Drive one engine in this process: give it each case's requests, and keep the outputs.

    python -m bench.engines.driver OUT --rows NAME... --size SIZE [--output N] [--model DIR]

The probe, which every side loads as the same plugin, records the steps. OUT gets JSON, in which
each case says from when to when it ran, on the probe's clock.
"""

from __future__ import annotations

import argparse
import gc
import json
import operator
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, cycle, islice
from pathlib import Path
from typing import Any

from demo import model

from bench import thinking
from bench.compare import outputs
from bench.engines.foreign_copies import ForeignCopies
from bench.engines.interference import Interference
from bench.engines.rows import BASELINE, ROWS, Case, Row
from bench.engines.rows import Engine as Spec

#: Prompts are cut from this text where there is a tokenizer.
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

    Attributes:
        asynchronous: whether it schedules asynchronously.
        stamps: for each step with outputs, when they came (``time.perf_counter_ns``), and for
            how many requests.
        baseline: token ids of each request in the baseline case, for bad words to forbid.
    """

    def __init__(self, spec: Spec, home: Path, path: str | None = None) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self.spec = spec
        generated: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
        arguments = EngineArgs(
            model=path or str(model.write(home, **spec.model)),
            **({} if path else generated),
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
        self.baseline: list[list[int]] = []
        core = self._engine.engine_core
        get_output = core.get_output

        def stamped() -> object:
            result = get_output()
            if result.outputs:
                self.stamps.append((time.perf_counter_ns(), len(result.outputs)))
            return result

        core.get_output = stamped

    def prompt(self, request: int) -> list[int]:
        """Return the token ids of a request's prompt."""
        spec, start = self.spec, request * self.spec.prompt
        if self._text:
            begin = request % len(self._text)
            prompt = list(islice(cycle(self._text), begin, begin + spec.prompt))
        else:
            positions = range(start, start + spec.prompt)
            prompt = [3 + 7919 * k % (self._vocabulary - 3) for k in positions]
        if spec.thinking:
            prompt[-len(thinking.START) :] = thinking.START
        return prompt

    def generate(self, row: Row, case: Case, length: int) -> list[Completion]:
        """Run a case's batch, greedily by default; return the completions in order.

        Args:
            row: gives the thinking budgets.
            case: gives the sampling parameters.
            length: tokens that each request generates.
        """
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        kind = RequestOutputKind.DELTA if case.streamed else RequestOutputKind.FINAL_ONLY
        for request in range(case.batch or self.spec.batch):
            parameters = dict(case.parameters_of(request))
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
                # vLLM makes tokens of words by a tokenizer, and there may be none.
                sampling._bad_words_token_ids = words(self.baseline[request], lengths)
            prompt = TokensPrompt(prompt_token_ids=self.prompt(request))
            self._engine.add_request(str(request), prompt, sampling)
        self.stamps.clear()
        completions = [Completion() for _ in range(case.batch or self.spec.batch)]
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                piece, whole = output.outputs[0], completions[int(output.request_id)]
                whole.token_ids += piece.token_ids
                whole.logprobs += piece.logprobs or ()
        return completions


def words(tokens: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Cut tokens into words of these lengths."""
    ends = list(accumulate(lengths))
    return [list(tokens[end - length : end]) for end, length in zip(ends, lengths, strict=True)]


def measure(rows: Sequence[Row], path: str | None, home: Path) -> dict[str, Any]:
    """Measure every case of the rows of one engine.

    Args:
        rows: of one engine.
        path: a model's directory, or None for a generated one.
        home: directory for a generated model.
    """
    interference = Interference()
    interference.install()
    engine = Engine(rows[0].engine, home, path)

    import torch

    gpu = torch.cuda.is_available()
    results = {
        row.name: {
            name: _case(engine, row, case, interference, gpu) for name, case in row.cases.items()
        }
        for row in rows
    }
    return {
        "device": torch.cuda.get_device_name() if gpu else "CPU",
        "scheduling": "async" if engine.asynchronous else "sync",
        "runner": interference.runner,
        "rows": results,
    }


def _case(
    engine: Engine, row: Row, case: Case, interference: Interference, gpu: bool
) -> dict[str, Any]:
    """Warm a case up and run it; return its times, outputs, counts and problems."""
    interference.consume = case.consumed
    engine.generate(row, replace(case, beside=False), row.warmup)
    gc.collect()
    foreign = ForeignCopies() if gpu and case.beside else None
    interference.foreign = foreign
    began = time.perf_counter_ns()
    completions = engine.generate(row, case, row.output)
    ended = time.perf_counter_ns()
    interference.foreign, interference.consume = None, False

    tokens = [[str(token) for token in one.token_ids] for one in completions]
    logprobs = [[_line(position) for position in one.logprobs] for one in completions]
    if case == row.cases[BASELINE]:
        engine.baseline = [one.token_ids for one in completions]
    batch = case.batch or engine.spec.batch
    counts = {
        "tokens": [sum(map(len, tokens)), batch * row.output],
        **_count_logprobs(row, case, completions, batch),
        **_count_effects(engine, row, case, completions),
    }
    problems = []
    if [size for _, size in engine.stamps] != [batch] * row.output and not case.streamed:
        problems.append(f"{len(engine.stamps)} steps, not {row.output} of {batch} tokens each")
    if gpu and engine.asynchronous != row.engine.asynchronous:
        problems.append(f"async scheduling is {'on' if engine.asynchronous else 'off'}")
    return {
        "window": [began, ended],
        "stamps": [stamp for stamp, _ in engine.stamps],
        "copies": foreign.finish() if foreign else None,
        "counts": counts,
        "problems": problems,
        "tokens": outputs.pack(tokens),
        "logprobs": outputs.pack(logprobs),
    }


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
    """Measure the rows that are named, and write the JSON."""
    parser = argparse.ArgumentParser(prog="bench.engines.driver")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", nargs="+", required=True, choices=list(ROWS))
    parser.add_argument("--size", required=True)
    parser.add_argument("--output", type=int)
    parser.add_argument("--model")
    args = parser.parse_args(argv)
    rows = [ROWS[name].sized(args.size, args.output) for name in args.rows]
    result = measure(rows, args.model, args.out.with_suffix(".model"))
    args.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
