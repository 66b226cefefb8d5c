"""Real engines with LoRA adapters: each request gets the reply of its own adapter."""

from typing import Any

import pytest
from support.engine import PreloadedEngine
from support.sites import REPO

pytestmark = pytest.mark.slow
PROGRAM = REPO / "tests" / "engine" / "adapted.py"
#: Stock cannot serve adapters on a CPU without this fix.
STOCK = "cpu-pinning"


def serve(engine: PreloadedEngine, switch: str) -> Any:
    """Return the replies by part, scenario and request, and those that each adapter gives alone."""
    environment = {"VLLM_READINESS": switch, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    report = engine.start(PROGRAM, environment=environment).finish()
    alone = report["alone"]
    assert len({tuple(reply) for reply in alone.values()}) == len(alone) == 4
    return report


def test_requests_get_the_replies_of_their_adapters(overlaid: PreloadedEngine) -> None:
    report = serve(overlaid, "on")
    alone = report["alone"]
    for part in ("blocks", "slots"):
        assert len(report[part]) >= 6
        for name, replies in report[part].items():
            assert replies == {asked: alone[asked] for asked in replies}, (part, name)


def test_with_the_fixes_off_blocks_are_shared_and_slots_are_mistaken(
    overlaid: PreloadedEngine,
) -> None:
    report = serve(overlaid, STOCK)
    right = {
        part: {name for name, replies in of.items() if replies.items() <= report["alone"].items()}
        for part, of in report.items()
        if part != "alone"
    }
    assert right["blocks"] == {"a salt for an adapter"}
    # Upstream walks a set of names. Which requests are mistaken depends on its order, which differs
    # from process to process; each order that was seen left one or two scenarios right, of six.
    assert 2 * len(right["slots"]) < len(report["slots"])
