"""A request's output depends neither on the overlay nor on the schedule.

A hundred requests that arrive, leave, are preempted and are prefilled in chunks, on a CPU
engine that can schedule asynchronously: stock, overlaid, and overlaid but switched off.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from bench import thinking
from engine.mixed import KINDS, cases
from support import asynchronous
from support.engine import PreloadedEngine, at_once
from support.sites import REPO

PROGRAM = REPO / "tests" / "engine" / "mixed.py"
PROCESSOR = "support.processors:ForbidLatest"
#: Installation (or the switch of an overlaid one), schedule, perhaps a logits processor.
NAMES = (
    *("stock sync", "stock async", "stock async processor"),
    *("on sync", "on async", "off async", "on async processor"),
)


Runs = dict[str, Any]


@pytest.fixture(scope="module")
def runs(folder: Path, stock: PreloadedEngine, overlaid: PreloadedEngine) -> Runs:
    """Every run's report, by name."""
    plugins = {
        "sync": asynchronous.announce(folder / "sync", thinking.unpin),
        "async": asynchronous.announce(folder / "async", asynchronous.register, thinking.unpin),
    }

    def result(name: str) -> Any:
        installation, schedule, *processor = name.split()
        engine, switch = stock, {}
        if installation != "stock":
            engine, switch = overlaid, {"VLLM_READINESS": installation}
        arguments = [schedule, *(PROCESSOR for _ in processor)]
        run = engine.start(PROGRAM, arguments, [plugins[schedule]], **switch)
        return run.finish() | {"log": run.text()}

    with ThreadPoolExecutor(max_workers=at_once()) as pool:
        return dict(zip(NAMES, pool.map(result, NAMES), strict=True))


def _answers(run_: Any) -> dict[str, Any]:
    """Each request's output, without the logprobs' values."""
    return {
        name: {
            **result,
            "logprobs": result["logprobs"]
            and [[[token, rank] for token, _, rank in top] for top in result["logprobs"]],
        }
        for name, result in run_["results"].items()
    }


def _values(run_: Any) -> list[float]:
    """The logprobs' values, in order."""
    return [
        value
        for result in run_["results"].values()
        for top in result["logprobs"] or ()
        for _, value, _ in top
    ]


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("on sync", "stock sync"),
        ("on async", "stock async"),
        ("off async", "stock async"),
        ("on async processor", "stock async processor"),
    ],
)
def test_the_overlay_gives_what_stock_gives_bit_for_bit(
    runs: Runs, name: str, reference: str
) -> None:
    assert runs[name]["results"] == runs[reference]["results"]


@pytest.mark.parametrize("installation", ["stock", "on"])
def test_both_schedules_give_the_same_tokens(runs: Runs, installation: str) -> None:
    """The last bits of the logits depend on which tokens are computed together."""
    synchronous, other = (runs[f"{installation} {schedule}"] for schedule in ("sync", "async"))
    assert _answers(synchronous) == _answers(other)
    assert _values(synchronous) == pytest.approx(_values(other), rel=1e-4, abs=1e-4)


def test_each_run_imported_its_installation(runs: Runs) -> None:
    for name, outcome in runs.items():
        assert ("Readiness overlay" in outcome["log"]) == (not name.startswith("stock")), name


def test_the_engine_scheduled_as_it_was_asked_to(runs: Runs) -> None:
    for name, outcome in runs.items():
        stats = outcome["stats"]
        unready = stats["outputs handed over unready"]
        if "async" in name:
            assert stats["scheduler"] == "AsyncScheduler", name
            assert unready > 100, name
        else:
            assert stats["scheduler"] == "Scheduler", name
            assert unready == 0, name


def test_requests_were_preempted_resumed_chunked_and_aborted(runs: Runs) -> None:
    for name, outcome in runs.items():
        stats = outcome["stats"]
        assert stats["preempted"] >= 4, name
        assert stats["resumed"] >= 4, name
        assert stats["prefill chunks"] >= 20, name
        assert len(outcome["aborted"]) >= 10, name
        assert len(outcome["results"]) >= 80, name


def test_the_answers_are_diverse(runs: Runs) -> None:
    """Otherwise identical outputs would say little."""
    results = list(runs["stock sync"]["results"].values())
    assert len({json.dumps(result["tokens"]) for result in results}) > 0.9 * len(results)
    assert len({token for result in results for token in result["tokens"]}) > 500
    assert {result["finish"] for result in results} == {"length", "stop"}
    assert sum(result["logprobs"] is not None for result in results) > 40


def test_the_processor_decides_by_the_newest_tokens(runs: Runs) -> None:
    """With it, no token recurs within two; without it, some do."""

    def repeats(name: str) -> int:
        lists = [result["tokens"] for result in runs[name]["results"].values()]
        return sum(
            tokens[n] in tokens[max(0, n - 2) : n] for tokens in lists for n in range(len(tokens))
        )

    assert repeats("stock async") > 20
    assert repeats("on async processor") == 0


def test_thinking_ended_where_its_budget_was_used_up(runs: Runs) -> None:
    """Otherwise identical outputs would say little of budgets."""
    for name in ("stock sync", "on async"):
        ended = [
            number
            for number, case in enumerate(cases())
            if KINDS[case.kind].get("thinking_token_budget", 100) < 20
            and case.name in runs[name]["results"]
            and thinking.ended(runs[name]["results"][case.name]["tokens"])
        ]
        assert len(ended) > 8
