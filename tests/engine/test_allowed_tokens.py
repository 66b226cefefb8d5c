"""A request's output does not depend on the schedule where others have allowed tokens.

On stock it does: here the overlay gives other tokens on purpose.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engine.allowed import EVERY, REQUESTS, allowed
from support import asynchronous
from support.engine import PreloadedEngine, at_once
from support.sites import REPO

PROGRAM = REPO / "tests" / "engine" / "allowed.py"
BUDGETS = ("24", "48")

Runs = dict[str, Any]


@pytest.fixture(scope="module")
def runs(folder: Path, stock: PreloadedEngine, overlaid: PreloadedEngine) -> Runs:
    """Every run's report, by installation and schedule."""
    late = asynchronous.announce(folder / "late", asynchronous.register)
    started = {
        "stock sync": (stock, []),
        "overlaid sync": (overlaid, []),
        "overlaid async": (overlaid, [late]),
    }

    def result(name: str) -> Any:
        engine, paths = started[name]
        return engine.start(PROGRAM, [name.split()[1], *BUDGETS], paths).finish()

    with ThreadPoolExecutor(max_workers=at_once()) as pool:
        return dict(zip(started, pool.map(result, started), strict=True))


def _differing(one: list[list[int]], other: list[list[int]]) -> list[int]:
    """The requests whose tokens differ."""
    return [number for number in range(REQUESTS) if one[number] != other[number]]


def _unbound(results: list[list[int]]) -> list[int]:
    """The requests that gave a token not allowed to them."""
    return [n for n, tokens in enumerate(results) if not {*tokens} <= {*(allowed(n) or tokens)}]


def test_each_request_gives_the_same_tokens_whatever_the_schedule(runs: Runs) -> None:
    reference = runs["overlaid sync"]["results"][BUDGETS[0]]
    for schedule in ("sync", "async"):
        for budget in BUDGETS:
            assert not _differing(reference, runs[f"overlaid {schedule}"]["results"][budget])


def test_on_stock_tokens_depend_on_the_schedule(runs: Runs) -> None:
    """Otherwise upstream has a fix, or these requests do not show the fault."""
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
        stats = outcome["stats"]
        assert stats["scheduler"] == ("AsyncScheduler" if "async" in name else "Scheduler")
        assert (stats["outputs handed over unready"] > 100) == ("async" in name), name
        assert stats["prefill chunks"] >= 20, name
        assert stats["swaps"] >= 20, name
