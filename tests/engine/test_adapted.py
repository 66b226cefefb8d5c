"""Real engines with LoRA adapters: each request gets the reply of its own adapter."""

from typing import Any

import pytest
from support.engine import PreloadedEngine
from support.sites import REPO

pytestmark = pytest.mark.slow
PROGRAM = REPO / "tests" / "engine" / "adapted.py"
#: Stock cannot serve adapters on a CPU without this fix.
STOCK = "cpu-pinning"


def serve(engine: PreloadedEngine, switch: str, part: str) -> tuple[Any, Any]:
    """Return a part's replies by scenario and request, and those that each adapter gives alone."""
    environment = {"VLLM_READINESS": switch, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    report = engine.start(PROGRAM, [part], environment=environment).finish()
    alone = report["alone"]
    assert len({tuple(reply) for reply in alone.values()}) == len(alone) == 4
    return report[part], alone


@pytest.mark.parametrize("part", ["blocks", "slots"])
def test_requests_get_the_replies_of_their_adapters(overlaid: PreloadedEngine, part: str) -> None:
    scenarios, alone = serve(overlaid, "on", part)
    assert len(scenarios) >= 6
    for name, replies in scenarios.items():
        assert replies == {asked: alone[asked] for asked in replies}, name


def test_with_the_fixes_off_blocks_are_shared(overlaid: PreloadedEngine) -> None:
    scenarios, alone = serve(overlaid, STOCK, "blocks")
    right = {name for name, replies in scenarios.items() if replies.items() <= alone.items()}
    assert right == {"a salt for an adapter"}


def test_with_the_fixes_off_slots_are_mistaken(overlaid: PreloadedEngine) -> None:
    scenarios, alone = serve(overlaid, STOCK, "slots")
    right = {name for name, replies in scenarios.items() if replies.items() <= alone.items()}
    # Upstream walks a set of names. Which requests are mistaken depends on its order, which differs
    # from process to process; each order that was seen left one or two scenarios right, of six.
    assert 2 * len(right) < len(scenarios)
