"""Real engines whose KV loads fail among other requests: replies are those without a connector.

The connector is :class:`support.shelf.Shelf`. A wrong token shows, since a block that failed has
garbage in it.
"""

from typing import Any

import pytest
from engine.failing import KINDS, differences
from support.engine import PreloadedEngine
from support.sites import REPO

pytestmark = pytest.mark.slow
PROGRAM = REPO / "tests" / "engine" / "failing.py"


def serve(engine: PreloadedEngine, switch: str, *parts: str) -> Any:
    """Return the report of these parts."""
    environment = {"VLLM_READINESS": switch}
    return engine.start(PROGRAM, list(parts), environment=environment).finish()


def check(part: Any) -> None:
    """Compare a part's outputs, and whether loads failed and succeeded."""
    assert part["error"] is None
    assert differences(part) == []
    counts = part["counts"]
    assert counts["steps"] >= 5
    assert counts["failed"] >= 10
    assert counts["asked"] - counts["failed"] >= 10
    kinds = {name.partition("-")[0] for name in part["with"]}
    assert kinds == set(KINDS)


def test_replies_are_those_without_a_connector(overlaid: PreloadedEngine) -> None:
    names = ["sync drafts", "async", "async crowded"]
    report = serve(overlaid, "on", *names)
    for name in names:
        check(report[name])


@pytest.mark.parametrize("side", ["stock", "overlaid"])
def test_with_the_fix_off_the_engine_ends_as_stocks_does(
    side: str, request: pytest.FixtureRequest
) -> None:
    part = serve(request.getfixturevalue(side), "-failed-loads", "async")["async"]
    assert "with" not in part
    assert "index out of range" in part["error"]
