"""The feature mamba-launches: a step's layers repeat the first one's launches, or are upstream's.

Upstream's layers run, with kernels that stand for Triton's (support.launched). With real ones:
tests/gpu/test_mamba_launches.py.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import launched
from support.recurrent import (
    DRAFTED,
    LAYERS,
    SHAPES,
    Family,
    GatedDelta,
    Mamba2,
    OtherBackend,
    OtherRule,
)
from triton.runtime.autotuner import Autotuner
from vllm.v1.readiness.layers import gated_delta, launches, mamba2, repeats

STEPS = len(SHAPES)
FAMILIES: dict[str, Callable[[Any, str], Family]] = {
    "Mamba 2": Mamba2,
    "gated delta": GatedDelta,
    "another library": OtherBackend,
}


@pytest.fixture(scope="module")
def imported() -> Iterator[Callable[[str], Any]]:
    with launched.layers() as load:
        yield load


@pytest.fixture
def family(request: pytest.FixtureRequest, imported: Callable[[str], Any]) -> Family:
    """Upstream's layers of a family, Mamba 2 without a parameter."""
    kind = FAMILIES[getattr(request, "param", "Mamba 2")]
    name = "mamba_mixer2" if kind is Mamba2 else "gdn.qwen_gdn_linear_attn"
    return kind(imported(name), "cpu")


def ours(family: Family) -> Callable[..., None]:
    return mamba2.run if isinstance(family, Mamba2) else gated_delta.run


def compared(family: Family, **of_steps: Any) -> list[int]:
    """Compute steps by upstream's layers and by ours, and compare all bits.

    Return how often each of our layers was upstream's.
    """
    expected = family.forward(lambda _, layer, *given: family.upstreams(layer, given), **of_steps)
    steps = len(of_steps.get("shapes", SHAPES))
    assert len(family.computed) == steps * LAYERS
    results = family.forward(ours(family), **of_steps)
    for one, other in zip(expected, results, strict=True):
        assert torch.equal(one.view(torch.int16), other.view(torch.int16))
    return [family.computed.count(f"layers.{place}") for place in range(LAYERS)]


@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_layers_repeat_the_first_ones_launches(family: Family) -> None:
    assert compared(family) == [STEPS, 0, 0, 0]


def test_layers_repeat_launches_with_drafts(imported: Callable[[str], Any]) -> None:
    family = Mamba2(imported("mamba_mixer2"), "cpu", drafts=2)
    assert compared(family, shapes=DRAFTED) == [len(DRAFTED), 0, 0, 0]


Change = Callable[[list[Any]], None]


def third(**values: Callable[[Any], Any]) -> Change:
    """Give the third layer attributes that are made of the layer."""

    def change(layers: list[Any]) -> None:
        for name, value in values.items():
            setattr(layers[2], name, value(layers[2]))

    return change


def odd(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy whose address is odd, for what Triton specializes a kernel on."""
    copy = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
    return copy.copy_(tensor)


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with other strides."""
    return tensor.repeat_interleave(2, -1)[..., ::2]


def wrapped(forward: str, layer: Any) -> Callable[..., None]:
    """Return a forward of a plugin, which adds 1 to the output."""
    upstreams = getattr(layer, forward)

    def with_more(**given: torch.Tensor) -> None:
        upstreams(**given)
        [*given.values()][-1].add_(1)

    return with_more


def derived(layer: Any) -> type:
    """Return a class of a plugin, whose forward is upstream's."""
    return type("Derived", (type(layer),), {})


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("Mamba 2", third(A=lambda layer: odd(layer.A))),
        ("Mamba 2", third(A=lambda layer: spread(layer.A))),
        ("Mamba 2", third(D=lambda layer: layer.D.float())),
        ("Mamba 2", third(conv1d=lambda layer: SimpleNamespace(bias=None))),
        ("Mamba 2", third(activation=lambda layer: "swish")),
        ("Mamba 2", third(__class__=derived)),
        ("Mamba 2", third(conv_ssm_forward=partial(wrapped, "conv_ssm_forward"))),
        ("gated delta", third(A_log=lambda layer: odd(layer.A_log))),
        ("gated delta", third(gdn_prefill_backend=lambda layer: "flashinfer")),
        ("gated delta", third(chunk_gated_delta_rule=lambda layer: OtherRule())),
        ("gated delta", third(enable_packed_recurrent_decode=lambda layer: False)),
        ("gated delta", third(__class__=derived)),
        ("gated delta", third(_forward_core=partial(wrapped, "_forward_core"))),
    ],
    indirect=["family"],
    ids=[
        *("alignment", "strides", "dtype", "no bias", "activation", "class", "wrapped"),
        *("alignment of gates", "library", "rule", "decodes", "class of nets", "wrapped net"),
    ],
)
def test_a_layer_unlike_the_first_is_upstreams(family: Family, change: Change) -> None:
    assert compared(family, change=change) == [STEPS, 0, STEPS, 0]


Fields = Callable[[Any], dict[str, Any]]


def _programs(metadata: Any) -> dict[str, Any]:
    """Return one more program of the convolution."""
    sizes = {size: {**each, "tot": each["tot"] + 1} for size, each in metadata.nums_dict.items()}
    return {"nums_dict": sizes}


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("Mamba 2", lambda metadata: {"num_reqs": metadata.num_reqs + 1}),
        ("Mamba 2", lambda metadata: {"seq_idx_p": odd(metadata.seq_idx_p)}),
        ("Mamba 2", _programs),
        ("gated delta", lambda metadata: {"num_decode_tokens": 1 + metadata.num_decode_tokens}),
        ("gated delta", lambda metadata: {"chunk_indices": odd(metadata.chunk_indices)}),
        ("gated delta", _programs),
    ],
    indirect=["family"],
    ids=["number", "tensor", "programs", "number of nets", "tensor of nets", "programs of nets"],
)
def test_a_layer_whose_metadata_is_unlike_the_first_ones_is_upstreams(
    family: Family, fields: Fields
) -> None:
    assert compared(family, shapes=SHAPES[:4], fields=fields) == [4, 4, 0, 4]


def copying(name: str) -> Change:
    """Have all layers pass copies of a weight to their kernels."""

    def change(layers: list[Any]) -> None:
        weight = property(lambda layer: vars(layer)[f"_{name}"].clone())
        kind = type("Copying", (type(layers[0]),), {name: weight})
        for layer in layers:
            vars(layer)[f"_{name}"] = vars(layer).pop(name)
            layer.__class__ = kind

    return change


def test_a_step_whose_kernels_get_copies_is_upstreams(family: Family) -> None:
    assert compared(family, change=copying("D")) == [STEPS] * LAYERS


def test_a_step_whose_buffers_are_copied_is_upstreams(
    imported: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = imported("gdn.qwen_gdn_linear_attn")
    prepare = module.fused_post_conv_prep

    def copying(**given: Any) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in prepare(**given)]

    monkeypatch.setattr(module, "fused_post_conv_prep", copying)
    shapes = [shape for shape in SHAPES if shape.prompts]
    assert compared(GatedDelta(module, "cpu"), shapes=shapes) == [len(shapes)] * LAYERS


def test_a_step_with_buffers_larger_than_estimated_is_upstreams(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mamba2.Mamba2, "may_repeat", lambda layer, metadata: True)
    monkeypatch.setattr(repeats, "_memory", lambda device: 1)
    others = sum(bool(shape.prompts) for shape in SHAPES)
    assert compared(family) == [STEPS, others, others, others]


def test_a_step_with_seeds_is_upstreams(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.mamba.ops import ssu_dispatch

    config = ssu_dispatch.get_mamba_ssu_backend()._mamba_config
    monkeypatch.setattr(config, "enable_stochastic_rounding", True)
    others = sum(bool(shape.decodes) for shape in SHAPES)
    assert compared(family) == [STEPS, others, others, others]


def test_a_large_step_is_not_noted(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "_memory", lambda device: 1)
    monkeypatch.setattr(launches, "noting", None)  # it keeps what upstream frees
    shapes = [shape for shape in SHAPES if shape.prompts]
    assert compared(family, shapes=shapes) == [len(shapes)] * LAYERS


def test_a_step_in_which_triton_tunes_is_upstreams(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned = Autotuner.run

    def tried(self: Any, *args: Any, **named: Any) -> Any:
        tuned(self, *args, **named)
        return tuned(self, *args, **named)

    monkeypatch.setattr(Autotuner, "run", tried)
    others = sum(bool(shape.prompts) for shape in SHAPES)
    assert compared(family) == [STEPS, others, others, others]


@pytest.mark.parametrize("family", ["Mamba 2", "gated delta"], indirect=True)
def test_a_step_whose_layers_are_all_wrapped_is_upstreams(family: Family) -> None:
    forward, *_ = family.METHODS

    def wrap(layers: list[Any]) -> None:
        """Give all layers the same forward, which takes them in turns."""
        turns, upstreams = itertools.cycle(layers), getattr(type(layers[0]), forward)

        def with_more(**given: torch.Tensor) -> None:
            upstreams(next(turns), **given)
            [*given.values()][-1].add_(1)

        for layer in layers:
            setattr(layer, forward, with_more)

    assert compared(family, change=wrap) == [STEPS] * LAYERS


@pytest.mark.parametrize("family", ["Mamba 2", "gated delta"], indirect=True)
def test_a_step_whose_first_layer_is_wrapped_is_upstreams(family: Family) -> None:
    forward, *_ = family.METHODS

    def wrap(layers: list[Any]) -> None:
        setattr(layers[0], forward, wrapped(forward, layers[0]))

    assert compared(family, change=wrap) == [STEPS] * LAYERS


def _plugins(layers: list[Any]) -> None:
    """Make all layers those of a plugin."""
    kind = type("Derived", (type(layers[0]),), {"conv_ssm_forward": _forward})
    for layer in layers:
        layer.__class__ = kind


def _forward(layer: Any, projected_states: torch.Tensor, output: torch.Tensor) -> None:
    super(type(layer), layer).conv_ssm_forward(projected_states, output)
    output += 1


@pytest.mark.parametrize(
    ("name", "value", "others"),
    [
        ("repeats._stream", lambda tensor: None, STEPS),
        ("repeats._memory", lambda device: 1, STEPS - 1),  # decodes need no buffers
        # As where FlashInfer updates states. One step has no decodes.
        ("mamba2._DECODES", mamba2._DECODES[:1], STEPS - 1),
        ("launches._watch", lambda: False, STEPS),
        ("launches.noting", None, STEPS),
    ],
    ids=["no stream", "large buffers", "another kernel", "another Triton", "off"],
)
def test_a_step_is_upstreams_with(
    name: str, value: Any, others: int, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "launches.noting":  # which keeps what upstream frees
        monkeypatch.setenv("VLLM_READINESS", "-mamba-launches")
    monkeypatch.setattr(f"vllm.v1.readiness.layers.{name}", value)
    assert compared(family) == [STEPS, others, others, others]


def test_a_step_of_a_plugins_layers_is_its_own(family: Family) -> None:
    assert compared(family, change=_plugins) == [STEPS] * LAYERS


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profiler_sees_all_launches(
    hook: str, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"triton.knobs.runtime.{hook}", lambda metadata: None)
    assert compared(family) == [STEPS] * LAYERS


def test_states_of_all_blocks_and_drafts_of_nets_are_upstreams() -> None:
    metadata = SimpleNamespace(num_prefills=0, block_idx_last_scheduled_token=torch.ones(1))
    assert not mamba2.Mamba2.may_repeat(None, metadata)
    metadata = SimpleNamespace(num_prefills=0, spec_sequence_masks=torch.ones(1))
    assert not gated_delta.GatedDelta.may_repeat(None, metadata)
