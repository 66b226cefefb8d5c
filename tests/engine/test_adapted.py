"""Real engines with LoRA adapters: each request gets the reply of its own adapter."""

import pytest
from support.engine import PreloadedEngine
from support.sites import REPO

pytestmark = pytest.mark.slow
PROGRAM = REPO / "tests" / "engine" / "adapted.py"
#: Stock cannot serve adapters on a CPU without this fix.
STOCK = "cpu-pinning"


def right(engine: PreloadedEngine, switch: str) -> dict[str, bool]:
    """Return by scenario if each request got the reply that its adapter gives alone."""
    environment = {"VLLM_READINESS": switch, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    report = engine.start(PROGRAM, environment=environment).finish()
    alone, blocks = report["alone"], report["blocks"]
    assert len({tuple(reply) for reply in alone.values()}) == len(alone) == 4
    assert len(blocks) >= 6
    return {name: replies.items() <= alone.items() for name, replies in blocks.items()}


def test_requests_get_the_replies_of_their_adapters(overlaid: PreloadedEngine) -> None:
    assert all(right(overlaid, "on").values())


def test_with_the_fixes_off_blocks_are_shared(overlaid: PreloadedEngine) -> None:
    shared = right(overlaid, STOCK)
    assert [name for name in shared if shared[name]] == ["a salt for an adapter"]
