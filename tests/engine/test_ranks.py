"""An engine of two ranks on the CPU that differ does not start.

The ranks share an installation; a plugin changes the environment of the second one. What else
ranks do is in tests/readiness/test_ranks.py.
"""

from pathlib import Path

import pytest
from engine.ranked import other_switch
from support import forked
from support.asynchronous import announce
from support.engine import PreloadedEngine
from support.sites import REPO

pytestmark = pytest.mark.slow

PROGRAM = REPO / "tests" / "engine" / "parallel.py"


def test_ranks_with_other_switches_do_not_start(folder: Path, overlaid: PreloadedEngine) -> None:
    plugins = [announce(folder / "ranks", other_switch)]
    environment = {**forked.ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    refused = overlaid.start(PROGRAM, ["tensor", "sync"], plugins, environment)
    assert refused.wait() != 0
    assert "the ranks of this engine run different overlays" in refused.text()
    assert "VLLM_READINESS=-penalties, which differs from most" in refused.text()
