"""What a request gives does not depend on the schedule where others have allowed tokens.

On stock it does: the one place where the overlay gives other tokens on purpose.
"""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engine.allowed import EVERY, REQUESTS, allowed
from overlay.errors import Exit
from support import asynchronous
from support.checkpoint import generate
from support.engine import Engine, at_once
from support.sites import REPO, run

PROGRAM = REPO / "tests" / "engine" / "allowed.py"
BUDGETS = ("24", "48")

Runs = dict[str, Any]


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    """What came out of every run, by installation and schedule."""
    folder = Path(tempfile.mkdtemp(prefix="allowed-", dir=REPO / "build"))
    engine = Engine(folder, forking=True)
    generate(folder / "model")
    late = asynchronous.announce(folder / "late", asynchronous.register)

    def result(name: str) -> Any:
        schedule = name.split()[1]
        paths = [REPO / "tests", *[late] * (schedule == "async")]
        return engine.start(PROGRAM, [schedule, *BUDGETS], paths).finish()

    found = {"stock sync": result("stock sync")}
    assert (
        run("apply", "--force", "--site", engine.site, "--python", sys.executable).returncode
        == Exit.DONE
    )
    names = ("overlaid sync", "overlaid async")
    with ThreadPoolExecutor(max_workers=at_once()) as pool:
        yield found | dict(zip(names, pool.map(result, names), strict=True))
    shutil.rmtree(folder)


def _differing(one: list[list[int]], other: list[list[int]]) -> list[int]:
    """The requests whose tokens differ."""
    return [number for number in range(REQUESTS) if one[number] != other[number]]


def _unbound(results: list[list[int]]) -> list[int]:
    """The requests that gave a token which is not allowed to them."""
    return [n for n, tokens in enumerate(results) if not {*tokens} <= {*(allowed(n) or tokens)}]


def test_each_request_gives_the_same_tokens_whatever_the_schedule(runs: Runs) -> None:
    reference = runs["overlaid sync"]["results"][BUDGETS[0]]
    for schedule in ("sync", "async"):
        for budget in BUDGETS:
            assert not _differing(reference, runs[f"overlaid {schedule}"]["results"][budget])


def test_on_stock_it_does_not(runs: Runs) -> None:
    """Else upstream has mended it, or nothing here would show it."""
    stock = runs["stock sync"]["results"]
    assert _differing(*(stock[budget] for budget in BUDGETS))
    for budget in BUDGETS:
        assert _differing(stock[budget], runs["overlaid sync"]["results"][budget])


def test_on_stock_requests_lose_their_masks_to_others(runs: Runs) -> None:
    stock = runs["stock sync"]["results"][BUDGETS[0]]
    assert _unbound(stock)


def test_requests_have_allowed_tokens_and_no_others(runs: Runs) -> None:
    for name in ("overlaid sync", "overlaid async"):
        for budget in BUDGETS:
            results = runs[name]["results"][budget]
            assert not _unbound(results)
            free = {token for n in range(REQUESTS) if allowed(n) is None for token in results[n]}
            assert len(free) > 200
    assert sum(allowed(number) is not None for number in range(REQUESTS)) == REQUESTS // EVERY


def test_the_engine_scheduled_as_it_was_asked_to(runs: Runs) -> None:
    for name, outcome in runs.items():
        evidence = outcome["evidence"]
        assert evidence["scheduler"] == ("AsyncScheduler" if "async" in name else "Scheduler")
        assert (evidence["outputs handed over unready"] > 100) == ("async" in name), name
        assert evidence["prefill chunks"] >= 20, name
        assert evidence["swaps"] >= 20, name
