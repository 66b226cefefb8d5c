"""An engine in this process, and steady batches: all requests begin and end together."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from bench import thinking
from bench.harness import disturbance, outputs
from bench.loops.rows import Request, Source, quantiles
from bench.results.slices import DISTURBANCE


class Steady:
    """An engine and its batches.

    Args:
        arguments: of vLLM's EngineArgs.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self._engine: Any = LLMEngine.from_engine_args(EngineArgs(**arguments))

    def warm_up(self, source: Source) -> None:
        """Run a batch of short requests."""
        self._generate([source.warmup(place) for place in range(source.concurrency)])

    def measure(self, source: Source, ramp: float, seconds: float) -> dict[str, Any]:
        """Measure a batch.

        Returns:
            The figures, times in ms; the packed outputs; and received and expected counts.
        """
        del ramp, seconds
        requests = [source.steady(place) for place in range(source.concurrency)]
        # Draws of requests without a seed must not depend on the past.
        self._engine.collective_rpc(reseed)
        before, began = disturbance.snapshot(), time.perf_counter()
        completions, stamps = self._generate(requests)
        ended = time.perf_counter()
        disturbed = disturbance.during(before, disturbance.snapshot())
        tokens = [[token for tokens, _ in of for token in tokens] for of in completions]
        logprobs = [[line for _, lines in of for line in lines] for of in completions]
        figures = {
            "tokens/s": sum(map(len, tokens)) / (ended - began),
            **quantiles("ITL", [after - before for before, after in pairwise(stamps)]),
            **quantiles("TTFT", [stamps[0] - began]),
            DISTURBANCE: disturbed,
        }
        return {
            "figures": figures,
            "outputs": {
                "tokens": outputs.pack([list(map(str, of)) for of in tokens]),
                "logprobs": outputs.pack(logprobs),
            },
            "counts": counts(requests, tokens, logprobs),
        }

    def shutdown(self) -> None:
        """End the engine."""
        self._engine.engine_core.shutdown()

    def _generate(
        self, requests: Sequence[Request]
    ) -> tuple[list[list[tuple[list[int], list[str]]]], list[float]]:
        """Run a batch.

        Returns:
            For each request the tokens and logprobs of each output, and the moments of the steps
            with outputs.
        """
        for number, one in enumerate(requests):
            self._engine.add_request(str(number), one.prompt, one.sampling)
        completions: list[list[tuple[list[int], list[str]]]] = [[] for _ in requests]
        stamps = []
        while self._engine.has_unfinished_requests():
            answers = self._engine.step()
            if answers:
                stamps.append(time.perf_counter())
            for one in answers:
                (piece,) = one.outputs
                # After a step without logprobs, vLLM returns those of an earlier position again.
                lines = [
                    _line(position) if token in position else ""
                    for token, position in zip(piece.token_ids, piece.logprobs or (), strict=False)
                ]
                completions[int(one.request_id)].append((list(piece.token_ids), lines))
        return completions, stamps


def counts(
    requests: Sequence[Request], tokens: Sequence[Sequence[int]], logprobs: Sequence[Sequence[str]]
) -> dict[str, tuple[int, int]]:
    """Return received and expected numbers of outputs, by kind.

    Args:
        requests: of the batch.
        tokens: of each request.
        logprobs: a line for each position of each request; see :func:`_line`.
    """
    lengths = [one.sampling.max_tokens or 0 for one in requests]
    tops = [one.sampling.logprobs for one in requests]
    # A line names the sampled token, which may be one of the top ones, or come in addition.
    whole = sum(
        len(line.split(" ")) >= (top or 0)
        for top, of in zip(tops, logprobs, strict=True)
        for line in of
    )
    asked = sum(length for length, top in zip(lengths, tops, strict=True) if top is not None)
    found = {
        "tokens": (sum(map(len, tokens)), sum(lengths)),
        "positions with all logprobs": (whole, asked),
    }
    budgets = [one.sampling.thinking_token_budget for one in requests]
    if any(budget is not None for budget in budgets):
        room = len(thinking.END)
        due = [b is not None and b + room <= n for b, n in zip(budgets, lengths, strict=True)]
        ended = sum(thinking.ended(list(of)) for of in tokens)
        found["requests that used up their budget"] = (ended, sum(due))
    return found


def reseed(worker: object) -> None:
    """Seed torch in a worker's process, as ``collective_rpc`` calls it."""
    import torch

    del worker
    torch.manual_seed(0)


def _line(logprobs: Mapping[int, Any]) -> str:
    return " ".join(f"{t}:{lp.rank}:{lp.logprob!r}" for t, lp in logprobs.items()) or "none"
