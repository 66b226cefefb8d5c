"""A refused request's image, sent again: the fix mm-caches in an engine of two processes."""

import pytest
from support.engine import PreloadedEngine
from support.sites import REPO

pytestmark = pytest.mark.slow
PROGRAM = REPO / "tests" / "engine" / "pictured.py"


@pytest.mark.parametrize(
    ("side", "switch"), [("stock", ""), ("overlaid", "-mm-caches"), ("overlaid", "on")]
)
def test_the_image_of_a_refused_request_can_be_sent_again(
    side: str, switch: str, request: pytest.FixtureRequest
) -> None:
    engine: PreloadedEngine = request.getfixturevalue(side)
    setting = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    if switch:
        setting["VLLM_READINESS"] = switch
    report = engine.start(PROGRAM, environment=setting).finish()
    assert "Requested sample logprobs of 99" in report["refused"]
    reason, tokens = report["other"]
    assert (reason, len(tokens)) == ("length", 4)
    if switch == "on":
        first, second = report["later"]
        assert first == second
        assert (first[0], len(first[1])) == ("length", 4)
    else:
        assert report["later"] == [["error", []]] * 2
