"""Engines with thinking budgets on a GPU, overlaid and not, with and without drafts."""

import json
from collections import Counter
from typing import Any

import pytest
from bench import thinking
from gpu.kinds import ENGINES, ENVIRONMENT, GUARD
from support.engine import Engine, Run
from support.sites import REPO

pytestmark = pytest.mark.gpu

PROGRAM = REPO / "tests" / "gpu" / "kinds.py"
Runs = dict[tuple[str, str], Any]


@pytest.fixture(scope="module")
def runs(engines: dict[str, Engine]) -> Runs:
    """The report of each engine, stock and overlaid."""

    def start(side: str, name: str) -> Run:
        ours = {**ENVIRONMENT, GUARD: "error", "VLLM_READINESS": "-fixes"}
        settings = ENVIRONMENT if side == "stock" else ours
        return engines[side].start(PROGRAM, [name, "--thinking"], environment=settings)

    started = {(side, name): start(side, name) for name in ENGINES for side in engines}
    return {key: run.finish() for key, run in started.items()}


def results(outcome: Any) -> dict[str, Any]:
    """Each request's output."""
    assert outcome["failed"] is None, outcome["failed"]
    assert outcome["errors"] == []
    batches = outcome["batches"].values()
    return {name: output for batch in batches for name, output in batch["results"].items()}


@pytest.mark.parametrize("engine", ENGINES)
def test_tokens_and_logprobs_are_stocks_bit_for_bit(runs: Runs, engine: str) -> None:
    assert results(runs["stock", engine]) == results(runs["overlaid", engine])


@pytest.mark.parametrize("engine", ENGINES)
def test_budgets_were_used_up(runs: Runs, engine: str) -> None:
    """Otherwise identical outputs would say little."""
    answers = [output["tokens"] for output in results(runs["stock", engine]).values()]
    assert sum(map(thinking.ended, answers)) > len(answers) / 2
    assert len(set(map(json.dumps, answers))) > len(answers) / 2


def fences(outcome: Any) -> tuple[int, Counter[str]]:
    """Return the number of steps that sampled, and their waits by owner."""
    total: Counter[str] = Counter()
    steps = [waits for function, waits, _, _ in outcome["calls"] if function == "sample_tokens"]
    for waits in steps:
        total.update(waits)
    return len(steps), total


def test_few_steps_wait_and_by_name(runs: Runs) -> None:
    """A request may wait where its end is forced: at each of the end's tokens and once after.

    If the host is not ahead of the device, there is nothing to wait for.
    """
    steps, waits = fences(runs["overlaid", "async"])
    assert waits.keys() <= {"thinking-budget"}
    requests = len(results(runs["overlaid", "async"]))
    assert waits["thinking-budget"] <= requests * (len(thinking.END) + 1) < steps
    steps, waits = fences(runs["overlaid", "ngram_gpu"])
    assert waits.keys() <= {"thinking-budget", "penalties", "bad-words", "min-tokens"}
    assert waits["thinking-budget"] < steps
