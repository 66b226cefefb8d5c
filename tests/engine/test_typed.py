"""Values of other types than declared: the engine lives."""

import pytest
from support.engine import PreloadedEngine
from support.sites import REPO

pytestmark = pytest.mark.slow
PROGRAM = REPO / "tests" / "engine" / "typed.py"


def test_an_engine_survives_requests_of_wrong_types(overlaid: PreloadedEngine) -> None:
    """Stock's ends. Front ends in the core's process: tests/readiness/test_bad_requests.py."""
    setting = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    became = overlaid.start(PROGRAM, environment=setting).finish()
    plain = became["plain"][0]
    assert len(plain) == 4
    assert all(after == plain for _, after in became.values())
    assert became["numpy's seed"][0] == plain
    assert became["numpy's ids"][0] == became["plain ids"][0]
    assert "seed: the engine cannot read True" in became["a bool as a seed"][0]
    assert "logprobs: the engine cannot read 2.0" in became["logprobs as a float"][0]
    assert "max_tokens: the engine cannot read 4.0" in became["a float"][0]
