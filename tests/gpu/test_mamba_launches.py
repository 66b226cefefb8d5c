"""Layers that repeat the launches of a step's first layer: the bits of upstream's layers."""

from typing import Any

import pytest
import torch
from support import modules
from support.recurrent import (
    DRAFTED,
    LAYERS,
    SHAPES,
    Family,
    GatedDelta,
    Mamba2,
    OtherBackend,
    Shape,
)
from triton.runtime.jit import JITFunction
from vllm.v1.readiness.layers import gated_delta, launches, mamba2

pytestmark = pytest.mark.gpu

LAYER = "vllm/model_executor/layers/mamba"


@pytest.fixture
def tritons(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that Triton itself launches."""
    assert launches._watch()
    launched: list[str] = []
    run = JITFunction.run

    def noted(self: Any, *args: Any, **named: Any) -> Any:
        launched.append(self.__name__)
        return run(self, *args, **named)

    monkeypatch.setattr(JITFunction, "run", noted)
    return launched


@pytest.mark.parametrize(
    ("kind", "shapes"),
    [(Mamba2, SHAPES), (Mamba2, DRAFTED), (GatedDelta, SHAPES), (OtherBackend, SHAPES)],
    ids=["Mamba 2", "with drafts", "gated delta nets", "another library"],
)
def test_the_bits_are_upstreams(kind: type[Any], shapes: list[Shape], tritons: list[str]) -> None:
    mamba = kind is Mamba2
    name = "mamba_mixer2" if mamba else "gdn/qwen_gdn_linear_attn"
    family: Family = kind(modules.pristine(f"{LAYER}/{name}.py"), "cuda", shapes[0].drafts)
    ours = mamba2.run if mamba else gated_delta.run

    def upstreams(_: Any, layer: Any, *given: torch.Tensor) -> None:
        family.upstreams(layer, given)

    family.forward(upstreams, shapes)  # with the autotuner's trials
    tritons.clear()
    expected = family.forward(upstreams, shapes)
    launched = len(tritons)
    tritons.clear()
    results = family.forward(ours, shapes)
    assert family.computed == ["layers.0"] * len(shapes)
    assert len(tritons) * LAYERS == launched
    for one, other in zip(expected, results, strict=True):
        assert one.isfinite().all()
        assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
