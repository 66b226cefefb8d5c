"""Gated delta nets (Qwen3.5, Qwen3-Next), whose launches a step repeats.

In a step with a prompt upstream computes decodes as prompts of one token. Steps with drafts are
upstream's. Prompts are computed by Triton's kernels, or by another library (FlashInfer, CuteDSL):
it is called for each layer, and only what is before and behind it is repeated.
"""

# mirrors: vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention
# mirrors: vllm.model_executor.layers.fla.ops.chunk:chunk_gated_delta_rule_fwd

from collections.abc import Collection, Sequence
from types import MappingProxyType
from typing import Any

import torch
from vllm.v1.readiness.layers import repeats
from vllm.v1.readiness.layers.repeats import Step, Tensors

_PREPARE = "_fused_post_conv_kernel"
_STATES = "chunk_gated_delta_rule_fwd_kernel_h_blockdim64"
_OUTPUT = "chunk_fwd_kernel_o"
_BEFORE = ("_causal_conv1d_fwd_kernel", _PREPARE)
_RULE = (
    "chunk_local_cumsum_scalar_kernel",
    "chunk_scaled_dot_kkt_fwd_kernel",
    "merge_16x16_to_64x64_inverse_kernel",
    "recompute_w_u_fwd_kernel",
    _STATES,
    _OUTPUT,
)
_DECODES = (
    "_causal_conv1d_update_kernel",
    "fused_recurrent_gated_delta_rule_packed_decode_kernel",
)

_PREPARED = ("q", "k", "v", "g", "beta")
_CHUNKS = {"cu_seqlens": "starts", "chunk_indices": "chunks"}


def run(
    context: Any,
    layer: Any,
    mixed: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    output: torch.Tensor,
) -> None:
    """Compute the states and the output of a QwenGatedDeltaNetAttention.

    Args:
        context: the ForwardContext.
        layer: the QwenGatedDeltaNetAttention.
        mixed: ``[tokens, channels]``, queries, keys and values before the convolution.
        b: ``[tokens, heads]``, gates of what is written.
        a: ``[tokens, heads]``, gates of what is kept.
        output: ``[tokens, heads, dim]``, which the result is written to.
    """
    repeats.run(GatedDelta, context, layer, mixed, b, a, output)


class GatedDelta(Step):
    """The launches of a step's first gated delta net."""

    METHODS = ("_forward_core", "_forward_core_decode_non_spec")
    KERNELS = MappingProxyType(
        {
            **repeats.convolutions("mixed"),
            _PREPARE: {
                "mixed_qkv_ptr": None,
                "a_ptr": "a",
                "b_ptr": "b",
                "A_log_ptr": "A_log",
                "dt_bias_ptr": "dt_bias",
                **dict.fromkeys(f"{name}_ptr" for name in _PREPARED),
            },
            "chunk_local_cumsum_scalar_kernel": {
                **dict.fromkeys("so"),
                **_CHUNKS,
            },
            "chunk_scaled_dot_kkt_fwd_kernel": {
                **dict.fromkeys(("k", "beta", "g", "A")),
                **_CHUNKS,
            },
            "merge_16x16_to_64x64_inverse_kernel": {
                **dict.fromkeys(("A", "Ai")),  # what no kernel writes of Ai is 0
                **_CHUNKS,
            },
            "recompute_w_u_fwd_kernel": {
                **dict.fromkeys(("k", "v", "beta", "w", "u", "A", "g")),
                **_CHUNKS,
            },
            _STATES: {
                **dict.fromkeys(("k", "v", "w", "v_new", "g", "h", "h0", "ht")),
                "cu_seqlens": "starts",
                "chunk_offsets": "chunk_offsets",
            },
            _OUTPUT: {
                **dict.fromkeys(("q", "k", "v", "h", "g", "o")),
                **_CHUNKS,
            },
            "fused_recurrent_gated_delta_rule_packed_decode_kernel": {
                "mixed_qkv": "mixed",
                "a": "a",
                "b": "b",
                "A_log": "A_log",
                "dt_bias": "dt_bias",
                "o": "output",
                "h0": "ssm_states",
                "ht": "ssm_states",
                "ssm_state_indices": "decodes",
            },
        }
    )

    @staticmethod
    def forward(layer: Any, *given: torch.Tensor) -> None:
        """Compute a layer by upstream's code."""
        mixed, b, a, output = given
        layer._forward_core(mixed_qkv=mixed, b=b, a=a, core_attn_out=output)

    @staticmethod
    def upstreams() -> type:
        """Return upstream's class of the layers."""
        from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn

        kind: type = qwen_gdn_linear_attn.QwenGatedDeltaNetAttention
        return kind

    @classmethod
    def may_repeat(cls, layer: Any, metadata: Any) -> bool:
        """Return False for steps with drafts, and for large buffers."""
        if metadata.spec_sequence_masks is not None:
            return False
        if not metadata.num_prefills:
            return True
        states = layer.kv_cache[1]
        tokens = metadata.num_actual_tokens
        # Of a token some eight bfloat16 tensors, each about as wide as states have rows; of a chunk
        # a state.
        rows = states[0].numel() // states.shape[-1]
        chunks = len(metadata.chunk_indices) * states[0].numel()
        size = (5 * tokens * rows + chunks) * torch.float32.itemsize
        return bool(size <= repeats.most(states.device))

    @staticmethod
    def settings(layer: Any) -> tuple[Any, ...]:
        """Return what a layer's launches depend on but its class and its tensors."""
        rule = layer.chunk_gated_delta_rule
        return (
            type(rule),
            vars(rule).get("forward"),
            layer.gdn_prefill_backend,
            layer.enable_packed_recurrent_decode,
            layer.activation,
        )

    @staticmethod
    def own(layer: Any, *given: torch.Tensor) -> Tensors:
        """Return the tensors that belong to a layer."""
        mixed, b, a, output = given
        conv_states, ssm_states = layer.kv_cache
        return repeats.present(
            mixed=mixed,
            b=b,
            a=a,
            output=output,
            conv_weights=layer.conv1d.weight,
            conv_bias=layer.conv1d.bias,
            A_log=layer.A_log,
            dt_bias=layer.dt_bias,
            conv_states=conv_states,
            ssm_states=ssm_states,
        )

    @staticmethod
    def shared(metadata: Any) -> Tensors:
        """Return the tensors that layers with the same metadata share."""
        blocks = metadata.non_spec_state_indices_tensor
        if not metadata.num_prefills:
            return {"decodes": blocks}
        return {
            "prompts": blocks,
            "begun": metadata.has_initial_state,
            "starts": metadata.non_spec_query_start_loc,
            "chunks": metadata.chunk_indices,
            "chunk_offsets": metadata.chunk_offsets,
            "conv_rows": metadata.batch_ptr,
            "conv_offsets": metadata.token_chunk_offset_ptr,
        }

    @staticmethod
    def orders(metadata: Any) -> Sequence[Sequence[str]]:
        """Return the kernels that a layer may launch, in order."""
        if metadata.num_prefills:
            return [[*_BEFORE, *_RULE], [*_BEFORE]]
        return [[*_DECODES]]

    def ends(self) -> Collection[tuple[str, str]]:
        """Return the states before and behind each prompt, and the outputs."""
        if _OUTPUT in self.repeated:
            return {(_STATES, "h0"), (_STATES, "ht"), (_OUTPUT, "o")}
        return {(_PREPARE, f"{name}_ptr") for name in _PREPARED}

    def prepare(self, metadata: Any, own: Tensors) -> None:
        """Prepare the buffers of prompts: the states before and behind each."""
        if not metadata.num_prefills:
            return
        states = own["ssm_states"]
        self._tokens = metadata.num_actual_tokens
        if _OUTPUT in self.repeated:
            self.initial = self.buffer(_STATES, "h0")
            self._ends = self.buffer(_STATES, "ht")
            self._result = self.buffer(_OUTPUT, "o")[0]
        else:
            prompts = len(metadata.has_initial_state)
            self.initial = states.new_empty((prompts, *states.shape[1:]))
            self._arguments = {
                **{name: self.buffer(_PREPARE, f"{name}_ptr")[None] for name in _PREPARED},
                "initial_state": self.initial,
                "output_final_state": True,
                "cu_seqlens": metadata.non_spec_query_start_loc,
                "chunk_indices": metadata.chunk_indices,
                "chunk_offsets": metadata.chunk_offsets,
                "use_qk_l2norm_in_kernel": False,
            }

    def compute(self, layer: Any, own: Tensors, shared: Any, addresses: dict[str, int]) -> None:
        """Compute a layer as the first one was."""
        if shared.blocks is None:
            self.launch(_DECODES, addresses)
            return
        states = own["ssm_states"]
        self.launch(_BEFORE, addresses)
        self.load(states, shared)
        if _OUTPUT in self.repeated:
            self.launch(_RULE, addresses)
            result, ends = self._result, self._ends
        else:
            outputs, ends = layer.chunk_gated_delta_rule(**self._arguments)
            result = outputs[0]
        # With prompts no row is padding, so that no block is negative.
        states.index_copy_(0, shared.blocks, ends.to(states.dtype))
        own["output"][: self._tokens] = result
