"""What a request gives depends neither on the overlay nor on how the engine schedules.

A hundred requests that arrive, leave, are preempted and are prefilled in chunks, on a CPU
engine that can schedule asynchronously: stock, overlaid, and overlaid but switched off.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from bench import thinking
from engine.mixed import KINDS, cases
from overlay.errors import Exit
from support import asynchronous
from support.checkpoint import generate
from support.engine import Engine, at_once
from support.sites import REPO, run

PROGRAM = REPO / "tests" / "engine" / "mixed.py"
PROCESSOR = "support.processors:ForbidLatest"


Runs = dict[str, Any]


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    """What came out of every run, by installation and schedule."""
    folder = Path(tempfile.mkdtemp(prefix="schedules-", dir=REPO / "build"))
    engine = Engine(folder, forking=True)
    generate(folder / "model")  # before two runs at once would
    late = asynchronous.announce(folder / "late", asynchronous.register, thinking.unpin)
    usual = asynchronous.announce(folder / "usual", thinking.unpin)

    def result(name: str) -> Any:
        installation, schedule, *processor = name.split()
        paths = [REPO / "tests", late if schedule == "async" else usual]
        arguments = [schedule, *(PROCESSOR for _ in processor)]
        switch = {} if installation == "stock" else {"VLLM_READINESS": installation}
        return engine.start(PROGRAM, arguments, paths, **switch).finish()

    def results(*names: str) -> Runs:
        with ThreadPoolExecutor(max_workers=at_once()) as pool:
            return dict(zip(names, pool.map(result, names), strict=True))

    found = results("stock sync", "stock async", "stock async processor")
    assert (
        run("apply", "--force", "--site", engine.site, "--python", sys.executable).returncode
        == Exit.DONE
    )
    found |= results("on sync", "on async", "off async", "on async processor")
    yield found
    shutil.rmtree(folder)


def _answers(run_: Any) -> dict[str, Any]:
    """What was answered, without the logprobs' values."""
    return {
        name: {
            **result,
            "logprobs": result["logprobs"]
            and [[[token, rank] for token, _, rank in at] for at in result["logprobs"]],
        }
        for name, result in run_["results"].items()
    }


def _values(run_: Any) -> list[float]:
    """The logprobs' values, in order."""
    return [
        value
        for result in run_["results"].values()
        for at in result["logprobs"] or ()
        for _, value, _ in at
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


def test_the_engine_scheduled_as_it_was_asked_to(runs: Runs) -> None:
    for name, outcome in runs.items():
        evidence = outcome["evidence"]
        unready = evidence["outputs handed over unready"]
        if "async" in name:
            assert evidence["scheduler"] == "AsyncScheduler", name
            assert unready > 100, name
        else:
            assert evidence["scheduler"] == "Scheduler", name
            assert unready == 0, name


def test_requests_were_preempted_resumed_chunked_and_aborted(runs: Runs) -> None:
    for name, outcome in runs.items():
        evidence = outcome["evidence"]
        assert evidence["preempted"] >= 4, name
        assert evidence["resumed"] >= 4, name
        assert evidence["prefill chunks"] >= 20, name
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
    """With it no token comes back within two; without it, some do."""

    def repeats(name: str) -> int:
        lists = [result["tokens"] for result in runs[name]["results"].values()]
        return sum(
            tokens[at] in tokens[max(0, at - 2) : at]
            for tokens in lists
            for at in range(len(tokens))
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
