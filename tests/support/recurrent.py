"""Recurrent layers of upstream's with drawn weights, and steps of decodes and prompts through them.

Real are the layers' forwards. For the kernels: on a GPU upstream's, else those of
:mod:`support.launched`.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch

LAYERS = 4
#: Blocks of states; the first belongs to no request.
BLOCKS = 16
CHUNK = 64
#: Tokens of padding behind a step's.
PADDING = 2


@dataclass(frozen=True)
class Shape:
    """A step.

    Attributes:
        prompts: length of each.
        decodes: number of requests that decode, in front of the prompts.
        continued: whether every other prompt continues from a state.
        drafts: of each decode.
    """

    prompts: tuple[int, ...] = ()
    decodes: int = 0
    continued: bool = False
    drafts: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens, without padding."""
        return self.decodes * (1 + self.drafts) + sum(self.prompts)

    @property
    def rows(self) -> int:
        """Number of requests."""
        return self.decodes + len(self.prompts)


SHAPES = [
    Shape((5,), 3),
    Shape((70, 3), 4),
    Shape((129, 1, 64), 0),
    Shape((7, 9), 6, continued=True),
    Shape((), 7),
    Shape((40,), 8),
]
#: With drafts.
DRAFTED = [Shape((5,), 3, drafts=2), Shape((), 6, drafts=2), Shape((9, 70), 2, True, drafts=2)]


class Family(ABC):
    """A kind of recurrent layers.

    Args:
        module: upstream's, with the layers' forward.
        device: of all tensors.

    Attributes:
        CLASS, METHODS: of upstream's layer, the forward first.
        DIM: of heads and of states; without a GPU no kernel needs more.
        computed: names of the layers that upstream's code has computed.
        drafts: of each decode, for which states have room.
    """

    CLASS: ClassVar[str]
    METHODS: ClassVar[Sequence[str]]
    HEADS: ClassVar[int] = 4

    def __init__(self, module: Any, device: str, drafts: int = 0) -> None:
        self.module, self.device, self.drafts = module, torch.device(device), drafts
        self.DIM = 64 if self.device.type == "cuda" else 8
        self.computed: list[str] = []

    @abstractmethod
    def layer(self, name: str) -> Any:
        """Draw a layer."""

    @abstractmethod
    def given(self, shape: Shape) -> list[torch.Tensor]:
        """Draw the arguments of a layer's forward; the output is the last."""

    @abstractmethod
    def metadata(self, shape: Shape) -> Any:
        """Make the metadata of a step, with blocks of states drawn by :meth:`blocks`."""

    @abstractmethod
    def other_blocks(self, metadata: Any, shape: Shape) -> Any:
        """Copy metadata for layers whose states are in other blocks."""

    @abstractmethod
    def upstreams(self, layer: Any, given: Sequence[torch.Tensor]) -> None:
        """Compute a layer by upstream's forward."""

    def drawn(self, *shape: int) -> torch.Tensor:
        """Draw a bfloat16 tensor."""
        return torch.randn(shape, device=self.device).to(torch.bfloat16)

    def blocks(self, shape: Shape, columns: int = 1) -> torch.Tensor:
        """Draw the block table of a step, int32 [requests, columns or more]."""
        columns = max(columns, 2)
        used = torch.randperm(columns * BLOCKS)[: shape.rows * columns] + 1
        return used.view(shape.rows, columns).to(torch.int32).to(self.device)

    @property
    def states(self) -> int:
        """Number of blocks of states."""
        return 2 * max(2, 1 + self.drafts) * BLOCKS

    def forward(
        self,
        run: Callable[..., None],
        shapes: Sequence[Shape] = SHAPES,
        change: Callable[[list[Any]], None] = lambda layers: None,
        fields: Callable[[Any], dict[str, Any]] = lambda metadata: {},
    ) -> list[torch.Tensor]:
        """Compute steps of :data:`LAYERS` layers.

        Args:
            run: computes a layer, by a context, the layer and the arguments of its forward.
            shapes: of the steps.
            change: what is done to the layers first.
            fields: returns some for the metadata of every other layer, which also has blocks of
                its own.

        Returns:
            What the layers wrote, and all states.
        """
        torch.manual_seed(0)
        self.computed.clear()
        with self._counting():
            return self._forward(run, shapes, change, fields)

    def _forward(
        self,
        run: Callable[..., None],
        shapes: Sequence[Shape],
        change: Callable[[list[Any]], None],
        fields: Callable[[Any], dict[str, Any]],
    ) -> list[torch.Tensor]:
        layers = [self.layer(f"layers.{place}") for place in range(LAYERS)]
        change(layers)
        results = []
        for shape in shapes:
            first = self.metadata(shape)
            others = self.other_blocks(first, shape)
            others = replace(others, **fields(others))
            by_layer = {
                layer.prefix: others if place % 2 else first for place, layer in enumerate(layers)
            }
            context = SimpleNamespace(attn_metadata=by_layer)
            with self.in_context(context):
                for layer in layers:
                    given = self.given(shape)
                    run(context, layer, *given)
                    results += given
        return results + [states for layer in layers for states in layer.kv_cache]

    @contextmanager
    def in_context(self, context: Any) -> Iterator[None]:
        """Set the ForwardContext that layers see."""
        before = self.module.get_forward_context
        self.module.get_forward_context = lambda: context
        try:
            yield
        finally:
            self.module.get_forward_context = before

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Note the layers that upstream's forward computes; ``_layer`` makes one of its fields."""
        upstreams, name = getattr(self.module, self.CLASS), self.METHODS[0]
        forward = getattr(upstreams, name)

        def count(layer: Any, *args: Any, **named: Any) -> Any:
            self.computed.append(layer.prefix)
            return forward(layer, *args, **named)

        with mock.patch.object(upstreams, name, count):
            methods = {name: getattr(upstreams, name) for name in self.METHODS}
            self._layer = type("Layer", (SimpleNamespace,), methods)
            yield

    def _convolution(self, lengths: Sequence[int]) -> dict[str, Any]:
        """Return the fields of metadata by which a convolution of prompts is divided."""
        from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata

        starts = torch.tensor(_ends(lengths), dtype=torch.int32)
        sizes, rows, offsets = compute_causal_conv1d_metadata(starts, device=self.device)
        return {"nums_dict": sizes, "batch_ptr": rows, "token_chunk_offset_ptr": offsets}

    def _ints(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


def _ends(lengths: Sequence[int]) -> list[int]:
    """Return 0, and the sums of the lengths up to each."""
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    return ends


class Mamba2(Family):
    """Mamba 2 layers."""

    CLASS, METHODS = "MambaMixer2", ("conv_ssm_forward",)

    def __init__(self, module: Any, device: str, drafts: int = 0) -> None:
        super().__init__(module, device, drafts)
        from vllm.config.mamba import MambaConfig
        from vllm.model_executor.layers.mamba.ops import ssu_dispatch

        ssu_dispatch._mamba_ssu_backend = ssu_dispatch.TritonSSUBackend(MambaConfig())

    def layer(self, name: str) -> Any:
        """Draw a layer."""
        heads, dim = self.HEADS, self.DIM
        channels = (heads + 2) * dim
        # Of a float32 page that has more in it.
        states = torch.randn(self.states, 2, heads, dim, dim, device=self.device)[:, 1]
        return self._layer(
            prefix=name,
            cache_config=SimpleNamespace(mamba_block_size=CHUNK, mamba_cache_mode="none"),
            kv_cache=(self.drawn(self.states, 3 + self.drafts, channels), states),
            conv_weights=self.drawn(channels, 4),
            conv1d=SimpleNamespace(bias=self.drawn(channels)),
            A=-torch.rand(heads, device=self.device),
            D=self.drawn(heads),
            dt_bias=self.drawn(heads),
            activation="silu",
            num_spec=self.drafts,
            tped_intermediate_size=heads * dim,
            tped_conv_size=channels,
            tped_dt_size=heads,
            num_heads=heads,
            head_dim=dim,
            n_groups=1,
            ssm_state_size=dim,
            tp_size=1,
            is_blackwell=False,
            split_hidden_states_B_C_fn=partial(
                torch.split, split_size_or_sections=[heads * dim, dim, dim], dim=-1
            ),
        )

    def given(self, shape: Shape) -> list[torch.Tensor]:
        """Draw the projection of a step's tokens, and the output."""
        channels = self.HEADS * self.DIM
        width = 2 * channels + 2 * self.DIM + self.HEADS
        tokens = shape.tokens + PADDING
        return [self.drawn(tokens, width), self.drawn(tokens, channels).zero_()]

    def metadata(self, shape: Shape) -> Any:
        """Make the metadata of a step."""
        prompts = len(shape.prompts)
        chunks, last, rows = [0], list[int](), list[int]()
        for row, length in enumerate(shape.prompts):
            begin = chunks[-1]
            stops = [*range(begin + CHUNK, begin + length, CHUNK), begin + length]
            chunks += stops
            rows += [row] * len(stops)
            last.append(len(rows) - 1)
        continued = [bool(row % 2 == 0 and shape.continued) for row in range(prompts)]
        decodes = _ends([1 + shape.drafts] * shape.decodes)
        accepted = [1 + row % (1 + shape.drafts) for row in range(shape.decodes)]
        plain = self.module.Mamba2AttentionMetadata(
            num_prefills=prompts,
            num_prefill_tokens=sum(shape.prompts),
            num_decodes=shape.decodes,
            num_decode_tokens=decodes[-1],
            num_reqs=shape.rows,
            has_initial_states_p=torch.tensor(continued, device=self.device),
            query_start_loc_p=self._ints(_ends(shape.prompts)),
            num_computed_tokens_p=None,
            state_indices_tensor_p=None,
            state_indices_tensor_d=None,
            query_start_loc_d=self._ints(decodes) if self.drafts else None,
            num_accepted_tokens=self._ints(accepted) if self.drafts else None,
            block_idx_last_scheduled_token=None,
            block_idx_first_scheduled_token_p=None,
            block_idx_last_computed_token=None,
            block_idx_last_scheduled_token_prev_step=None,
            seq_lens=self._ints([1] * shape.rows),
            cu_chunk_seqlen_p=self._ints(chunks),
            last_chunk_indices_p=self._ints(last),
            seq_idx_p=self._ints(rows),
            prep_initial_states=shape.continued,
            chunk_size=CHUNK,
            **self._convolution(shape.prompts),
        )
        return self.other_blocks(plain, shape)

    def other_blocks(self, metadata: Any, shape: Shape) -> Any:
        """Copy metadata for layers whose states are in other blocks."""
        table = self.blocks(shape, 1 + self.drafts)
        decodes = table[: shape.decodes, : 1 + self.drafts]
        prompts = table[shape.decodes :, 0]
        return replace(metadata, state_indices_tensor_p=prompts, state_indices_tensor_d=decodes)

    def upstreams(self, layer: Any, given: Sequence[torch.Tensor]) -> None:
        """Compute a layer by upstream's forward."""
        projected, output = given
        layer.conv_ssm_forward(projected_states=projected, output=output)


class GatedDelta(Family):
    """Gated delta nets. Decodes of a step with prompts are prompts of one token."""

    CLASS = "QwenGatedDeltaNetAttention"
    METHODS = ("_forward_core", "_forward_core_decode_non_spec", "rearrange_mixed_qkv")
    KEYS = 2
    #: The library that computes prompts.
    backend = "triton"

    def layer(self, name: str) -> Any:
        """Draw a layer."""
        channels = (2 * self.KEYS + self.HEADS) * self.DIM
        states = torch.randn(self.states, 2, self.HEADS, self.DIM, self.DIM, device=self.device)
        return self._layer(
            prefix=name,
            kv_cache=(self.drawn(self.states, 3, channels), states[:, 1].to(torch.bfloat16)),
            conv1d=SimpleNamespace(weight=self.drawn(channels, 1, 4), bias=None),
            A_log=torch.rand(self.HEADS, device=self.device),
            dt_bias=self.drawn(self.HEADS),
            activation="silu",
            tp_size=1,
            num_k_heads=self.KEYS,
            num_v_heads=self.HEADS,
            head_k_dim=self.DIM,
            head_v_dim=self.DIM,
            key_dim=self.KEYS * self.DIM,
            value_dim=self.HEADS * self.DIM,
            gdn_prefill_backend=self.backend,
            enable_packed_recurrent_decode=True,
            chunk_gated_delta_rule=self.rule(),
        )

    def rule(self) -> Any:
        """Make what computes prompts."""
        rule = object.__new__(self.module.ChunkGatedDeltaRule)
        torch.nn.Module.__init__(rule)
        rule._forward_method = rule.forward_native
        return rule

    def given(self, shape: Shape) -> list[torch.Tensor]:
        """Draw queries, keys and values, gates, and the output."""
        tokens = shape.tokens + PADDING
        gates = [self.drawn(tokens, self.HEADS) for _ in range(2)]
        channels = (2 * self.KEYS + self.HEADS) * self.DIM
        output = self.drawn(tokens, self.HEADS, self.DIM).zero_()
        return [self.drawn(tokens, channels), *gates, output]

    def metadata(self, shape: Shape) -> Any:
        """Make the metadata of a step."""
        fields: dict[str, Any] = {}
        lengths = [*[1] * shape.decodes, *shape.prompts]
        if shape.prompts:
            from vllm.model_executor.layers.fla.ops import index
            from vllm.model_executor.layers.fla.ops.utils import FLA_CHUNK_SIZE

            starts = torch.tensor(_ends(lengths), dtype=torch.int32)
            for name in ("indices", "offsets"):
                prepare = getattr(index, f"prepare_chunk_{name}")
                fields[f"chunk_{name}"] = prepare(starts, FLA_CHUNK_SIZE).to(self.device)
            begun = [True] * shape.decodes
            begun += [bool(row % 2 == 0 and shape.continued) for row in range(len(shape.prompts))]
            fields["has_initial_state"] = torch.tensor(begun, device=self.device)
            fields.update(self._convolution(lengths))
        plain = self.module.GDNAttentionMetadata(
            num_prefills=len(shape.prompts),
            num_prefill_tokens=sum(shape.prompts),
            num_decodes=shape.decodes,
            num_decode_tokens=shape.decodes,
            num_spec_decodes=0,
            num_spec_decode_tokens=0,
            num_actual_tokens=shape.tokens,
            non_spec_query_start_loc=self._ints(_ends(lengths)),
            **fields,
        )
        return self.other_blocks(plain, shape)

    def other_blocks(self, metadata: Any, shape: Shape) -> Any:
        """Copy metadata for layers with other blocks, built apart: no tensor is the same."""
        tensors = {
            name: value.clone()
            for name, value in vars(metadata).items()
            if torch.is_tensor(value) and name not in ("batch_ptr", "token_chunk_offset_ptr")
        }
        tensors["non_spec_state_indices_tensor"] = self.blocks(shape)[:, 0]
        return replace(metadata, **tensors)

    def upstreams(self, layer: Any, given: Sequence[torch.Tensor]) -> None:
        """Compute a layer by upstream's forward."""
        mixed, b, a, output = given
        layer._forward_core(mixed_qkv=mixed, b=b, a=a, core_attn_out=output)


class OtherBackend(GatedDelta):
    """Gated delta nets whose prompts another library than Triton computes, here PyTorch."""

    backend = "flashinfer"

    def rule(self) -> Any:
        """Make what computes prompts: something of all its arguments."""
        return OtherRule()


class OtherRule:
    """Stands for another library's computation of prompts."""

    def __call__(self, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, g, beta = (given[name].float() for name in ("q", "k", "v", "g", "beta"))
        assert given["output_final_state"]
        assert not given["use_qk_l2norm_in_kernel"]
        starts = given["cu_seqlens"].tolist()
        assert len(given["chunk_offsets"]) == len(starts)
        states = given["initial_state"].float().clone()
        gates = (g.exp() * beta)[..., None]
        output = v * gates + (q + k).repeat_interleave(v.shape[2] // q.shape[2], 2)
        for row, (begin, end) in enumerate(itertools.pairwise(starts)):
            output[:, begin:end] += states[row].sum(-1)
            states[row] += output[0, begin:end].sum(0)[..., None]
        return output.to(given["v"].dtype), states
