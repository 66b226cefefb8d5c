"""A real engine on a GPU, before apply and after it.

Needs a Python that imports vllm==0.22.0 on a machine with an NVIDIA GPU:

    PYTHON -m pytest -m gpu tests/gpu
"""

import json

import pytest
from support.engine import Engine
from support.sites import OVERLAY, run

pytestmark = pytest.mark.gpu


def test_the_same_tokens_and_logprobs_on_a_gpu(engine: Engine) -> None:
    stock = engine.start()
    pristine = stock.finish()
    assert "Readiness overlay" not in stock.text()
    engine.apply()
    overlaid = engine.start()
    assert overlaid.finish() == pristine
    digest = json.loads(run("status", "--site", engine.site, "--json").stdout)["digest"]
    line = f"Readiness overlay {OVERLAY.pin.overlay}, digest {digest}, features: "
    assert overlaid.text().count(line) == 1
    engine.revert()
    assert engine.start().finish() == pristine


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu"])
def test_the_same_with_drafts(engine: Engine, method: str) -> None:
    """Several tokens a step; ngram_gpu schedules asynchronously, ngram does not."""
    drafts = {"method": method, "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    arguments = [json.dumps(drafts)]
    pristine = engine.start(arguments=arguments).finish()
    engine.apply()
    assert engine.start(arguments=arguments).finish() == pristine
    assert len({json.dumps(result["tokens"]) for result in pristine}) > len(pristine) // 2
