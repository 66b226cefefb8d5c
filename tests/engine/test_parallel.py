"""Engines of two ranks on the CPU, each a process of its own, beside stock."""

from typing import Any

import pytest
from support.engine import PreloadedEngine
from support.sites import REPO

PROGRAM = REPO / "tests" / "engine" / "parallel.py"
#: vLLM gives each rank a NUMA node of its own unless told otherwise.
ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def run(engine: PreloadedEngine, parallel: str, **environment: str) -> Any:
    """Each request's output, by its name, and of each rank whether it has the event for inputs."""
    variables = {**ENVIRONMENT, **environment}
    done = engine.start(PROGRAM, [parallel, "sync"], environment=variables).finish()
    return done["outputs"], done["events"]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["tensor", "pipeline"])
def test_two_ranks_give_stocks_tokens_and_logprobs(
    stock: PreloadedEngine, overlaid: PreloadedEngine, parallel: str
) -> None:
    pristine, events = run(stock, parallel)
    assert len({str(output["tokens"]) for output in pristine.values()}) > len(pristine) // 2
    assert events == [False, False]
    pipeline = parallel == "pipeline"
    switch = "features,pinned-inputs"
    assert run(overlaid, parallel, VLLM_READINESS=switch) == (pristine, [pipeline, pipeline])
