"""The kernels of Mamba 2 layers, launched with and without Triton's own work: the same bits."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
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
            convolve_prompts=modules.overlaid(f"{OPS}causal_conv1d.py").causal_conv1d_fn,
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


def chunked(lengths: tuple[int, ...]) -> list[torch.Tensor]:
    """Cut prompts into chunks, in tensors of the host.

    Return where prompts begin, where chunks do, each with the end behind the last; the last chunk
    of each prompt; and the prompt of each chunk.
    """
    begins, ends, last, rows = [0], [0], list[int](), list[int]()
    for row, length in enumerate(lengths):
        begin = begins[-1]
        stops = [*range(begin + CHUNK, begin + length, CHUNK), begin + length]
        ends += stops
        rows += [row] * len(stops)
        last.append(len(rows) - 1)
        begins.append(begin + length)
    return [torch.tensor(each, dtype=torch.int32) for each in (begins, ends, last, rows)]


def prompts(ops: Any, lengths: tuple[int, ...], initial: bool, offset: int) -> list[torch.Tensor]:
    """Compute the prompts of a layer."""
    total = sum(lengths)
    begins, ends, lasts, sequence = (each.cuda() for each in chunked(lengths))
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


@pytest.fixture(scope="module")
def mixer(ops: Any) -> Iterator[Any]:
    """Upstream's layer, with the kernels' launches as we patch them."""
    module = modules.overlaid("vllm/model_executor/layers/mamba/mamba_mixer2.py")
    module.causal_conv1d_fn, module.causal_conv1d_update = ops.convolve_prompts, ops.convolve
    module.mamba_chunk_scan_combined_varlen = ops.prompts
    module.selective_state_update = ops.update
    upstreams = modules.pristine("vllm/model_executor/layers/mamba/mamba_mixer2.py").MambaMixer2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upstreams, "conv_ssm_forward", Layer.conv_ssm_forward)
        yield module


class Layer(SimpleNamespace):
    """The fields of a MambaMixer2, whose forward is ``forward``."""

    def conv_ssm_forward(self, **tensors: torch.Tensor) -> None:
        """Compute the layer, and note its name."""
        self.computed.append(self.prefix)
        self.forward(self, **tensors)


def layers(mixer: Any, computed: list[str]) -> dict[str, Any]:
    """Draw layers by name. ``computed`` gets the name of each that upstream computes."""
    made = {}
    for place in range(LAYERS):
        name = f"layers.{place}.mixer"
        channels = HEADS * DIM + 2 * STATE
        # Of a float32 page that has more in it.
        states = torch.randn(16, 2, HEADS, DIM, STATE, device="cuda")[:, 1]
        made[name] = Layer(
            computed=computed,
            forward=mixer.MambaMixer2.conv_ssm_forward,
            prefix=name,
            cache_config=SimpleNamespace(mamba_block_size=CHUNK, mamba_cache_mode="none"),
            kv_cache=(drawn(16, 3, channels), states),
            conv_weights=drawn(channels, 4),
            conv1d=SimpleNamespace(bias=drawn(channels)),
            A=-torch.rand(HEADS, device="cuda"),
            D=drawn(HEADS),
            dt_bias=drawn(HEADS),
            activation="silu",
            num_spec=0,
            tped_intermediate_size=HEADS * DIM,
            tped_conv_size=channels,
            tped_dt_size=HEADS,
            num_heads=HEADS,
            head_dim=DIM,
            n_groups=1,
            ssm_state_size=STATE,
            tp_size=1,
            is_blackwell=False,
            split_hidden_states_B_C_fn=partial(
                torch.split, split_size_or_sections=[HEADS * DIM, STATE, STATE], dim=-1
            ),
        )
    return made


def drawn_blocks(decodes: int, prompts: int) -> dict[str, torch.Tensor]:
    """Draw the fields of a step's metadata that say which blocks have the requests' states."""
    table = torch.randint(16, (15, 4), dtype=torch.int32)
    table[:, 0] = torch.randperm(15) + 1
    blocks = table.cuda()
    return {
        "state_indices_tensor_p": blocks[decodes : decodes + prompts, 0],
        "state_indices_tensor_d": blocks[:decodes, :1],
    }


def metadata(mixer: Any, lengths: tuple[int, ...], decodes: int, continued: bool) -> Any:
    """Make the metadata of a step: decodes, and prompts of these lengths behind them."""
    from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata

    begins, ends, last, rows = chunked(lengths)
    nums, batch, offsets = compute_causal_conv1d_metadata(begins, device=torch.device("cuda"))
    return mixer.Mamba2AttentionMetadata(
        num_prefills=len(lengths),
        num_prefill_tokens=sum(lengths),
        num_decodes=decodes,
        num_decode_tokens=decodes,
        num_reqs=len(lengths) + decodes,
        has_initial_states_p=torch.full((len(lengths),), continued, device="cuda"),
        query_start_loc_p=begins.cuda(),
        num_computed_tokens_p=None,
        **drawn_blocks(decodes, len(lengths)),
        query_start_loc_d=None,
        num_accepted_tokens=None,
        block_idx_last_scheduled_token=None,
        block_idx_first_scheduled_token_p=None,
        block_idx_last_computed_token=None,
        block_idx_last_scheduled_token_prev_step=None,
        seq_lens=torch.ones(len(lengths) + decodes, dtype=torch.int32, device="cuda"),
        cu_chunk_seqlen_p=ends.cuda(),
        last_chunk_indices_p=last.cuda(),
        seq_idx_p=rows.cuda(),
        nums_dict=nums,
        batch_ptr=batch,
        token_chunk_offset_ptr=offsets,
        prep_initial_states=continued,
        chunk_size=CHUNK,
    )


def forwards(mixer: Any, computed: list[str]) -> list[torch.Tensor]:
    """Compute steps of the layers; return the outputs and all states."""
    torch.manual_seed(0)
    made = layers(mixer, computed)
    names = [*made]
    results = []
    for place, lengths in enumerate([*STEPS, (), (40,)]):
        decodes = 0 if place == 2 else 3 + place
        first = metadata(mixer, lengths, decodes, continued=place == 3)
        # Half of the layers have blocks of their own.
        others = replace(first, **drawn_blocks(decodes, len(lengths)))
        by_layer = {name: others if index % 2 else first for index, name in enumerate(names)}
        context = SimpleNamespace(attn_metadata=by_layer, no_compile_layers=made)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mixer, "get_forward_context", lambda context=context: context)
            for name in names:
                tokens = decodes + sum(lengths) + 2  # and two of padding
                projected = drawn(tokens, 2 * HEADS * DIM + 2 * STATE + HEADS)
                output = torch.zeros(tokens, HEADS * DIM, dtype=torch.bfloat16, device="cuda")
                mixer.mamba_mixer2(projected, output, name)
                results.append(output)
    torch.accelerator.synchronize()
    return results + [states for layer in made.values() for states in layer.kv_cache]


def test_layers_that_repeat_the_first_ones_launches_have_its_bits(
    mixer: Any, tritons: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_READINESS", "-mamba-launches")
    computed: list[str] = []
    expected = forwards(mixer, computed)
    steps = len(STEPS) + 2
    assert len(computed) == steps * LAYERS
    monkeypatch.setenv("VLLM_READINESS", "on")
    forwards(mixer, [])
    computed.clear()
    tritons.clear()
    ours = forwards(mixer, computed)
    # Where prompts continue, each layer has initial states of its own.
    assert len(computed) == steps - 1 + LAYERS
    assert tritons == []
    for one, other in zip(expected, ours, strict=True):
        assert one.isfinite().all()
        assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
