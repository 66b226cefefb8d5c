"""A real engine on the CPU with drafts: requests that are not greedy."""

import json
from typing import Any

import pytest
from engine.drafts import DRAWN, ONE
from support.engine import PreloadedEngine
from support.sites import REPO

pytestmark = pytest.mark.slow
PROGRAM = REPO / "tests" / "engine" / "drafts.py"


@pytest.fixture(scope="module")
def report(overlaid: PreloadedEngine) -> Any:
    return overlaid.start(PROGRAM).finish()


def test_requests_with_one_token_to_choose_give_it(report: Any) -> None:
    """Whatever parameter leaves one alone, and with drafts as without."""
    greedy = report["plain"]["greedy"]
    assert len({json.dumps(tokens) for tokens in greedy}) == len(greedy)
    for name in ("plain", "drafts", "again"):
        for kind in ONE:
            assert report[name][kind] == greedy, (name, kind)


def test_a_seed_gives_the_same_tokens_again(report: Any) -> None:
    for kind in DRAWN:
        assert report["drafts"][kind] == report["again"][kind]
        assert report["drafts"][kind] != report["plain"]["greedy"]


def test_drafts_were_accepted(report: Any) -> None:
    """Otherwise the tokens would say little."""
    assert report["accepted"] > 100
