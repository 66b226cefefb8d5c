"""Real engines with n-gram drafts: a seeded reply does not depend on requests beside it."""

import pytest
from support.engine import PreloadedEngine
from support.sites import REPO

pytestmark = pytest.mark.slow
PROGRAM = REPO / "tests" / "engine" / "drafted.py"


@pytest.mark.parametrize("switch", ["on", "-draft-lengths"])
def test_seeded_replies_beside_requests_that_reach_max_model_len(
    overlaid: PreloadedEngine, switch: str
) -> None:
    environment = {"VLLM_READINESS": switch, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    report = overlaid.start(PROGRAM, environment=environment).finish()
    alone, beside = report["alone"], report["beside"]
    assert all(len(alone[name]) == 5 for name in alone if name.startswith("long"))
    different = [name for name in alone if beside[name] != alone[name]]
    assert bool(different) is (switch != "on"), different
