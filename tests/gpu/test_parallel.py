"""Engines of two ranks, on two GPUs: tensor and pipeline parallel, beside stock.

Stock runs twice, and must be the same twice. A pipeline of stock's would not be under synchronous
scheduling: the program gives it the event that the fix ``pinned-inputs`` gives ours.
"""

import itertools
from typing import Any

import pytest
import torch
from gpu.kinds import ENVIRONMENT
from support.engine import Engine
from support.sites import REPO

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

PROGRAM = REPO / "tests" / "engine" / "parallel.py"
KINDS = [*itertools.product(("tensor", "pipeline"), ("sync", "async"))]
SIDES = {"stock": "stock", "again": "stock", "overlaid": "overlaid"}
#: By kind and side, each request's output by its name.
Results = dict[tuple[str, str], dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def results(engines: dict[str, Engine], tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Outputs by kind and side. All engines start at once, and generate one after another."""
    outputs: Results = {}
    turn, switch = tmp_path_factory.mktemp("parallel") / "turn", "features,pinned-inputs"
    environment = {**ENVIRONMENT, "VLLM_READINESS": switch, "NCCL_NVLS_ENABLE": "0"}
    runs = {
        (kind, name): engines[view].start(PROGRAM, [*kind, str(turn)], environment=environment)
        for name, view in SIDES.items()
        for kind in KINDS
    }
    for (kind, name), each in runs.items():
        done = each.finish()
        outputs.setdefault(kind, {})[name] = done["outputs"]
        overlaid = name == "overlaid"
        fixed = overlaid and kind[0] == "pipeline"
        assert done["events"] == [fixed or kind[1] == "async"] * 2
        assert ("Readiness overlay" in each.text()) == overlaid
    return outputs


@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
def test_two_ranks_give_stocks_tokens_and_logprobs(results: Results, kind: tuple[str, str]) -> None:
    stock = results[kind]["stock"]
    assert len(stock) > 100
    different = {
        side: [name for name, output in stock.items() if outputs[name] != output]
        for side, outputs in results[kind].items()
    }
    assert different == {side: [] for side in SIDES}
