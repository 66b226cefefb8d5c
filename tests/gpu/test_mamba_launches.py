"""The kernels of Mamba 2 layers, launched with and without Triton's own work: the same bits."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import modules
from triton.runtime.jit import JITFunction

pytestmark = pytest.mark.gpu

OPS = "vllm/model_executor/layers/mamba/ops/"
HEADS, DIM, STATE, CHUNK = 4, 64, 64, 64
#: Lengths of prompts in each step; layers of a step have the same.
STEPS = [(5,), (70, 3), (5,), (129, 1, 64), (7, 9)]
LAYERS = 4
#: Module to its functions that launch kernels, called by upstream's ssd_combined.
PARTS = {
    "ssd_bmm": ["_bmm_chunk_fwd"],
    "ssd_chunk_scan": ["_chunk_scan_fwd"],
    "ssd_chunk_state": ["_chunk_cumsum_fwd", "_chunk_state_fwd"],
    "ssd_state_passing": ["_state_passing_fwd"],
}


@pytest.fixture(scope="module")
def ops() -> Iterator[Any]:
    """Upstream's functions, with the kernels' launches as we patch them."""
    combined = modules.pristine(f"{OPS}ssd_combined.py")
    with pytest.MonkeyPatch.context() as patch:
        for name, functions in PARTS.items():
            for function in functions:
                ours = getattr(modules.overlaid(f"{OPS}{name}.py"), function)
                patch.setattr(combined, function, ours)
        yield SimpleNamespace(
            prompts=combined.mamba_chunk_scan_combined_varlen,
            update=modules.overlaid(f"{OPS}mamba_ssm.py").selective_state_update,
            convolve=modules.overlaid(f"{OPS}causal_conv1d.py").causal_conv1d_update,
        )


@pytest.fixture
def tritons(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that Triton itself launches."""
    launched: list[str] = []
    run = JITFunction.run

    def noted(self: Any, *args: Any, **named: Any) -> Any:
        launched.append(self.__name__)
        return run(self, *args, **named)

    monkeypatch.setattr(JITFunction, "run", noted)
    return launched


def drawn(*shape: int, offset: int = 0) -> torch.Tensor:
    """Draw a bfloat16 tensor whose memory begins ``offset`` elements behind an aligned address."""
    size = torch.Size(shape).numel()
    return torch.randn(size + offset, device="cuda").to(torch.bfloat16)[offset:].view(shape)


def prompts(ops: Any, lengths: tuple[int, ...], initial: bool, offset: int) -> list[torch.Tensor]:
    """Compute the prompts of a layer."""
    total = sum(lengths)
    starts, chunks, last, rows = [0], [0], [], []
    for row, length in enumerate(lengths):
        begin = starts[-1]
        ends = [*range(begin + CHUNK, begin + length, CHUNK), begin + length]
        chunks += ends
        rows += [row] * len(ends)
        last.append(len(rows) - 1)
        starts.append(begin + length)
    on_device = [
        torch.tensor(each, dtype=torch.int32, device="cuda")
        for each in (starts, chunks, last, rows)
    ]
    begins, ends, lasts, sequence = on_device
    out = torch.empty(total, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    states = ops.prompts(
        drawn(total, HEADS, DIM, offset=offset),
        drawn(total, HEADS),
        -torch.rand(HEADS, device="cuda"),
        drawn(total, 1, STATE),
        drawn(total, 1, STATE),
        chunk_size=CHUNK,
        cu_seqlens=begins,
        cu_chunk_seqlens=ends,
        last_chunk_indices=lasts,
        seq_idx=sequence,
        out=out,
        D=torch.randn(HEADS, device="cuda"),
        dt_bias=torch.randn(HEADS, device="cuda"),
        initial_states=drawn(len(lengths), HEADS, DIM, STATE) if initial else None,
        dt_softplus=True,
        state_dtype=torch.bfloat16,
    )
    return [out, states]


def decodes(ops: Any, rows: int) -> list[torch.Tensor]:
    """Update the states of a layer's decodes."""
    states, convolved = drawn(16, HEADS, DIM, STATE), drawn(16, 3, 96).transpose(1, 2)
    places = torch.randperm(15, device="cuda")[:rows].to(torch.int32) + 1
    out = torch.empty(rows, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    heads = torch.rand(HEADS, device="cuda")
    ops.update(
        states,
        drawn(rows, HEADS, DIM),
        drawn(rows, HEADS)[:, :, None].expand(-1, -1, DIM),
        -heads[:, None, None].expand(-1, DIM, STATE),
        drawn(rows, 1, STATE),
        drawn(rows, 1, STATE),
        heads[:, None].expand(-1, DIM),
        dt_bias=heads[:, None].expand(-1, DIM),
        dt_softplus=True,
        state_batch_indices=places,
        out=out,
    )
    x = ops.convolve(
        drawn(rows, 96), convolved, drawn(96, 4), drawn(96), "silu", conv_state_indices=places
    )
    return [out, states, x, convolved]


def steps(ops: Any, offset: int) -> list[torch.Tensor]:
    """Compute all steps, each of :data:`LAYERS`."""
    torch.manual_seed(0)
    results = []
    for place, lengths in enumerate(STEPS):
        for _ in range(LAYERS):
            results += prompts(ops, lengths, bool(place % 2), offset)
            results += decodes(ops, 3 + place)
    torch.accelerator.synchronize()
    return results


@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "not aligned"])
def test_the_bits_are_tritons(
    offset: int, ops: Any, tritons: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_READINESS", "-mamba-launches")
    expected = steps(ops, offset)  # with the autotuner's trials
    tritons.clear()
    again = steps(ops, offset)
    assert len(tritons) == 7 * len(STEPS) * LAYERS
    monkeypatch.setenv("VLLM_READINESS", "on")
    steps(ops, offset)
    tritons.clear()
    ours = steps(ops, offset)
    assert tritons == []
    for one, other, third in zip(expected, again, ours, strict=True):
        bits = [each.contiguous().view(torch.uint8) for each in (one, other, third)]
        assert torch.equal(bits[0], bits[1])
        assert torch.equal(bits[0], bits[2])


def test_a_step_is_tritons_in_its_first_layer(
    ops: Any, tritons: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_READINESS", "on")
    prompts(ops, (33, 8), True, 0)
    prompts(ops, (33, 8), True, 0)
    tritons.clear()
    for _ in range(LAYERS):
        prompts(ops, (34, 8), True, 0)
    # The kernel between chunks does not know the number of tokens.
    assert sorted(tritons) == [
        "_bmm_chunk_fwd_kernel",
        "_chunk_cumsum_fwd_kernel",
        "_chunk_scan_fwd_kernel",
        "_chunk_state_fwd_kernel",
    ]
