"""Engines of two ranks, on two GPUs: tensor and pipeline parallel, beside stock.

Stock runs twice. Where batches depend on the time that things take, a request that is not the same
twice shows nothing of the overlay, and is not compared. Tensor parallel, all are the same twice.
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
def results(engines: dict[str, Engine]) -> Results:
    """What each side returned. The engines of one side run at once."""
    outputs: Results = {}
    for name, view in SIDES.items():
        environment = {**ENVIRONMENT, "VLLM_READINESS": "-fixes", "NCCL_NVLS_ENABLE": "0"}
        running = {
            kind: engines[view].start(PROGRAM, kind, environment=environment) for kind in KINDS
        }
        for kind, each in running.items():
            outputs.setdefault(kind, {})[name] = each.finish()
            assert ("Readiness overlay" in each.text()) == (view == "overlaid")
    return outputs


@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
def test_two_ranks_give_stocks_tokens_and_logprobs(results: Results, kind: tuple[str, str]) -> None:
    sides = results[kind]
    assert len(sides["stock"]) > 100
    alike = [name for name, output in sides["stock"].items() if output == sides["again"][name]]
    print(f"{kind}: stock equals itself in {len(alike)} of {len(sides['stock'])} requests")
    assert alike if kind[0] == "pipeline" else len(alike) == len(sides["stock"])
    different = [name for name in alike if sides["overlaid"][name] != sides["stock"][name]]
    assert not different, f"{len(different)} of {len(alike)}: {different[:5]}"
