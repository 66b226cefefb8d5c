"""Engines with thinking budgets on a GPU, overlaid and not, with and without drafts."""

import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from bench import thinking
from gpu.kinds import ENGINES, ENVIRONMENT, GUARD
from support.checkpoint import generate
from support.engine import Engine
from support.sites import REPO, UPSTREAM

pytestmark = pytest.mark.gpu

PROGRAM = REPO / "tests" / "gpu" / "kinds.py"
SIDES = ("stock", "on")
Runs = dict[tuple[str, str], Any]


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    """The report of each engine, stock and overlaid."""
    with tempfile.TemporaryDirectory(prefix="thinking-", dir=UPSTREAM) as folder:
        engines = {}
        for side in SIDES:
            (Path(folder) / side).mkdir()
            engines[side] = Engine(Path(folder) / side)
            generate(engines[side].folder / "model")
        engines["on"].apply()

        def result(wanted: tuple[str, str]) -> Any:
            side, name = wanted
            settings = dict(ENVIRONMENT)
            if side == "on":
                settings[GUARD] = "error"
            arguments = [name, "--thinking"]
            return engines[side].start(PROGRAM, arguments, [REPO / "tests"], **settings).finish()

        names = [(side, name) for name in ENGINES for side in SIDES]
        with ThreadPoolExecutor(min(len(names), os.cpu_count() or 1)) as pool:
            yield dict(zip(names, pool.map(result, names), strict=True))


def results(outcome: Any) -> dict[str, Any]:
    """Each request's output."""
    assert outcome["failed"] is None, outcome["failed"]
    assert outcome["errors"] == []
    batches = outcome["batches"].values()
    return {name: given for batch in batches for name, given in batch["results"].items()}


@pytest.mark.parametrize("engine", ENGINES)
def test_tokens_and_logprobs_are_stocks_bit_for_bit(runs: Runs, engine: str) -> None:
    assert results(runs["stock", engine]) == results(runs["on", engine])


@pytest.mark.parametrize("engine", ENGINES)
def test_budgets_were_used_up(runs: Runs, engine: str) -> None:
    """Otherwise identical outputs would say little."""
    given = results(runs["stock", engine])
    assert sum(thinking.ended(one["tokens"]) for one in given.values()) > len(given) / 2
    assert len({json.dumps(one["tokens"]) for one in given.values()}) > len(given) / 2


def fences(outcome: Any) -> tuple[int, Counter[str]]:
    """The number of steps that sampled, and their waits by owner."""
    total: Counter[str] = Counter()
    sampled = [given for function, given, _, _ in outcome["calls"] if function == "sample_tokens"]
    for given in sampled:
        total.update(given)
    return len(sampled), total


def test_few_steps_wait_and_by_name(runs: Runs) -> None:
    """A request may wait where its end is forced: at each of the end's tokens and once after.

    If the host is not ahead of the device, there is nothing to wait for.
    """
    steps, waits = fences(runs["on", "async"])
    assert waits.keys() <= {"thinking-budget"}
    requests = len(results(runs["on", "async"]))
    assert waits["thinking-budget"] <= requests * (len(thinking.END) + 1) < steps
    steps, waits = fences(runs["on", "ngram_gpu"])
    assert waits.keys() <= {"thinking-budget", "penalties", "bad-words", "min-tokens"}
    assert waits["thinking-budget"] < steps
