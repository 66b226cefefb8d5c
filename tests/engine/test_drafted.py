"""Drafts of a model with KV of its own, under asynchronous scheduling: stock's outputs."""

from typing import Any

import pytest
from engine import drafted
from support.engine import PreloadedEngine
from support.sites import REPO

pytestmark = pytest.mark.slow

PROGRAM = REPO / "tests" / "engine" / "drafted.py"


def test_requests_with_an_eagle_head_give_stocks_outputs(
    stock: PreloadedEngine, overlaid: PreloadedEngine
) -> None:
    runs = [
        each.start(PROGRAM, environment={"VLLM_READINESS": switch})
        for each, switch in ((stock, ""), (overlaid, "-fixes"))
    ]
    theirs, ours = reports = [run.finish() for run in runs]
    assert ours["outputs"] == theirs["outputs"]
    names = {request.name for request in drafted.requests() if request.aborted is None}
    assert ours["outputs"].keys() >= names
    assert {output["finish"] for output in ours["outputs"].values()} == {"length", "stop"}
    assert theirs["served"] == {}
    assert ours["served"]["served"] > 4 * ours["served"]["left"]
    for report in reports:
        stats: dict[str, Any] = report["stats"]
        assert stats["scheduler"] == "AsyncScheduler"
        assert stats["prefill chunks"] > 20
        assert stats["outputs handed over unready"] > 100
