"""KV loads that fail on a GPU, under traffic: replies are those without a connector.

The requests, the connector and the comparison are those of ``tests/engine/failing.py``. Engines on
a GPU schedule asynchronously by themselves.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from engine.failing import KINDS, PARTS, differences
from gpu.kinds import ENVIRONMENT
from support.engine import Engine
from support.sites import REPO

pytestmark = pytest.mark.gpu

PROGRAM = REPO / "tests" / "engine" / "failing.py"
#: Attention rounds more roughly there: without a connector, two schedules differ by 0.0023.
TOLERANCE = 0.01
ASYNC = [name for name, (asynchronous, _) in PARTS.items() if asynchronous]


@pytest.fixture(scope="module")
def report(engines: dict[str, Engine], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Our report of every part that schedules asynchronously; printed, to be read as well."""
    done = engines["overlaid"].start(PROGRAM, ASYNC, environment=ENVIRONMENT).finish()
    Path(tmp_path_factory.mktemp("failed") / "report.json").write_text(json.dumps(done))
    for name, part in done.items():
        print(name, part["counts"], part["stats"])
    return done


@pytest.mark.parametrize("name", ASYNC)
def test_replies_are_those_without_a_connector(report: Any, name: str) -> None:
    part = report[name]
    assert part["error"] is None
    assert differences(part, TOLERANCE) == []
    counts = part["counts"]
    assert part["stats"]["scheduler"] == "AsyncScheduler"
    assert counts["steps"] >= 5
    assert counts["failed"] >= 10
    assert counts["asked"] - counts["failed"] >= 10
    assert {name.partition("-")[0] for name in part["with"]} == set(KINDS)


def test_with_the_fix_off_the_engine_ends(engines: dict[str, Engine]) -> None:
    """Stock's by an assert on the device; ours names the request before it is launched."""
    switched = {**ENVIRONMENT, "VLLM_READINESS": "-failed-loads"}
    part = engines["overlaid"].start(PROGRAM, ["async"], environment=switched).finish()["async"]
    assert "with" not in part
    assert "index out of range: request" in part["error"]
