"""Long runs of every engine, stock and overlaid, under the sync guard: nothing waits or differs.

Each readback of the overlaid engines is delayed at random. All engines run at once, since nothing
is timed.
"""

import json
from typing import Any

import pytest
from gpu.kinds import ENVIRONMENT, GUARD
from gpu.long import ENGINES, REQUESTS, STEPS, requests
from support import thinking
from support.engine import Engine, Run
from support.sites import REPO

pytestmark = pytest.mark.gpu

PROGRAM = REPO / "tests" / "gpu" / "long.py"
OURS = {**ENVIRONMENT, GUARD: "error", "VLLM_READINESS": "-fixes"}
Runs = dict[tuple[str, str], Any]


@pytest.fixture(scope="module")
def runs(engines: dict[str, Engine]) -> Runs:
    """The report of each engine, stock and overlaid."""

    def start(side: str, name: str) -> Run:
        if side == "stock":
            return engines[side].start(PROGRAM, [name], environment=ENVIRONMENT)
        return engines[side].start(PROGRAM, [name, "7"], environment=OURS)

    started = {(side, name): start(side, name) for name in ENGINES for side in engines}
    return {key: run.finish() for key, run in started.items()}


def complaints(outcome: Any) -> str:
    """Return all errors of a run, with function and stack, and the guard's reports."""
    texts = [f"{error['function']}: {error['stack']}" for error in outcome["errors"]]
    return "\n".join([*texts, *outcome["reports"], outcome["failed"] or ""]).strip()


def results(outcome: Any) -> dict[str, Any]:
    """Each request's output, and each batch's number of steps."""
    batches = outcome["batches"].items()
    steps = {name: batch["steps"] for name, batch in batches}
    return steps | {name: out for _, batch in batches for name, out in batch["results"].items()}


@pytest.mark.parametrize("name", ENGINES)
class TestEngines:
    """Outputs, waits and coverage, by engine."""

    def test_tokens_and_logprobs_are_stocks_bit_for_bit(self, runs: Runs, name: str) -> None:
        stock, ours = (results(runs[side, name]) for side in ("stock", "overlaid"))
        assert complaints(runs["stock", name]) == ""
        assert [key for key in stock | ours if stock.get(key) != ours.get(key)] == []
        assert runs["overlaid", name]["delays"] > 300

    def test_no_step_waits_for_the_device_by_accident(self, runs: Runs, name: str) -> None:
        ours = runs["overlaid", name]
        assert complaints(ours) == ""
        assert "waits for the device" in (ours["planted"] or ""), "a planted sync was not found"

    def test_runs_are_long_and_cover_what_they_claim(self, runs: Runs, name: str) -> None:
        outcome = runs["stock", name]
        batches, stats = outcome["batches"], outcome["stats"]
        steady = sum(batch["steps"] for key, batch in batches.items() if key != "mixed")
        assert steady >= STEPS
        assert batches["mixed"]["steps"] >= STEPS
        assert stats["preempted"] > 10
        assert stats["resumed"] > 10
        assert stats["prefill chunks"] > 20
        asynchronous = name not in ("sync", "ngram")
        assert (stats["scheduler"] == "AsyncScheduler") is asynchronous
        arrivals = requests("ngram" in name, grammars=False)
        answers = batches["mixed"]["results"]
        assert answers.keys() == {each.name for each in arrivals if each.aborted is None}
        assert len(arrivals) == REQUESTS
        assert len({json.dumps(output["tokens"]) for output in answers.values()}) > 140
        assert sum(thinking.ended(output["tokens"]) for output in answers.values()) > 8


def test_drafts_are_accepted(runs: Runs) -> None:
    """Otherwise drafts would say little; a batch that does not change takes fewer steps."""
    for name in ENGINES:
        steps = runs["stock", name]["batches"]["steady 0"]["steps"]
        assert (steps < 300) is ("ngram" in name), name
