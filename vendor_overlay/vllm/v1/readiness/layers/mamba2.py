"""Mamba 2 layers (Bamba, Granite 4, Nemotron-H), whose launches a step repeats."""

# mirrors: vllm.model_executor.layers.mamba.mamba_mixer2:MambaMixer2.conv_ssm_forward
# mirrors: vllm.model_executor.layers.mamba.ops.ssd_combined:_mamba_chunk_scan_combined_fwd

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import torch
from vllm.v1.readiness.layers import repeats
from vllm.v1.readiness.layers.repeats import Step, Tensors

_SCAN = "_chunk_scan_fwd_kernel"
_PROMPTS = (
    "_causal_conv1d_fwd_kernel",
    "_chunk_cumsum_fwd_kernel",
    "_chunk_state_fwd_kernel",
    "_state_passing_fwd_kernel",
    "_bmm_chunk_fwd_kernel",
    _SCAN,
)
_DECODES = ("_causal_conv1d_update_kernel", "_selective_scan_update_kernel")


def run(context: Any, layer: Any, projected: torch.Tensor, output: torch.Tensor) -> None:
    """Compute the states and the output of a MambaMixer2.

    Args:
        context: the ForwardContext.
        layer: the MambaMixer2.
        projected: ``[tokens, channels]``, what the layer's first projection gave.
        output: ``[tokens, channels]``, which the result is written to.
    """
    repeats.run(Mamba2, context, layer, projected, output)


class Mamba2(Step):
    """The launches of a step's first Mamba 2 layer: those of prompts, then those of decodes."""

    METHODS = ("conv_ssm_forward",)
    KERNELS = MappingProxyType(
        {
            **repeats.convolutions("projected"),
            "_chunk_cumsum_fwd_kernel": {
                "dt_ptr": "projected",
                "A_ptr": "A",
                "dt_bias_ptr": "dt_bias",
                "dt_out_ptr": None,
                "dA_cumsum_ptr": None,
                "cu_chunk_seqlens_ptr": "chunks",
            },
            "_chunk_state_fwd_kernel": {
                **dict.fromkeys(("x_ptr", "b_ptr", "states_ptr", "dt_ptr", "dA_cumsum_ptr")),
                "cu_chunk_seqlens_ptr": "chunks",
            },
            "_state_passing_fwd_kernel": {
                **dict.fromkeys(("states_ptr", "out_ptr", "dA_cs_ptr", "initstates_ptr")),
                "last_chunk_indices_ptr": "last_chunks",
            },
            "_bmm_chunk_fwd_kernel": {
                **dict.fromkeys(("a_ptr", "b_ptr", "out_ptr")),
                "cu_chunk_seqlens_ptr": "chunks",
            },
            _SCAN: {
                **dict.fromkeys(("cb_ptr", "x_ptr", "dt_ptr", "dA_cumsum_ptr", "C_ptr")),
                **dict.fromkeys(("states_ptr", "initstates_ptr")),
                "out_ptr": "output",
                "D_ptr": "D",
                "seq_idx_ptr": "rows",
                "cu_chunk_seqlens_ptr": "chunks",
            },
            "_selective_scan_update_kernel": {
                "state_ptr": "ssm_states",
                "x_ptr": "projected",
                "dt_ptr": "projected",
                "dt_bias_ptr": "dt_bias",
                "A_ptr": "A",
                "B_ptr": "projected",
                "C_ptr": "projected",
                "D_ptr": "D",
                "out_ptr": "output",
                "state_batch_indices_ptr": "decodes",
                "dst_state_batch_indices_ptr": "decodes",
                "num_accepted_tokens_ptr": "accepted",
                "cu_seqlens_ptr": "draft_starts",
            },
        }
    )

    @staticmethod
    def forward(layer: Any, *given: torch.Tensor) -> None:
        """Compute a layer by upstream's code."""
        projected, output = given
        layer.conv_ssm_forward(projected_states=projected, output=output)

    @staticmethod
    def upstreams() -> type:
        """Return upstream's class of the layers."""
        from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

        kind: type = MambaMixer2
        return kind

    @classmethod
    def may_repeat(cls, layer: Any, metadata: Any) -> bool:
        """Return False for states of all blocks, which are copied on the host, and large states."""
        if metadata.block_idx_last_scheduled_token is not None:
            return False
        if not metadata.num_prefills:
            return True
        states = layer.kv_cache[1]
        # Of each chunk, before and behind it.
        chunks = 2 * len(metadata.seq_idx_p) * states[0].numel() * torch.float32.itemsize
        return bool(chunks <= repeats.most(states.device))

    @staticmethod
    def settings(layer: Any) -> tuple[Any, ...]:
        """Return what a layer's launches depend on but its class and its tensors."""
        return (layer.activation,)

    @staticmethod
    def own(layer: Any, *given: torch.Tensor) -> Tensors:
        """Return the tensors that belong to a layer."""
        projected, output = given
        conv_states, ssm_states = layer.kv_cache
        return repeats.present(
            projected=projected,
            output=output,
            conv_weights=layer.conv_weights,
            conv_bias=layer.conv1d.bias,
            A=layer.A,
            D=layer.D,
            dt_bias=layer.dt_bias,
            conv_states=conv_states,
            ssm_states=ssm_states,
        )

    @staticmethod
    def shared(metadata: Any) -> Tensors:
        """Return the tensors that layers with the same metadata share."""
        prompts = {
            "prompts": metadata.state_indices_tensor_p,
            "begun": metadata.has_initial_states_p,
            "starts": metadata.query_start_loc_p,
            "chunks": metadata.cu_chunk_seqlen_p,
            "last_chunks": metadata.last_chunk_indices_p,
            "rows": metadata.seq_idx_p,
            "conv_rows": metadata.batch_ptr,
            "conv_offsets": metadata.token_chunk_offset_ptr,
        }
        decodes = {
            "decodes": metadata.state_indices_tensor_d,
            "accepted": metadata.num_accepted_tokens,
            "draft_starts": metadata.query_start_loc_d,
        }
        return repeats.present(
            **(prompts if metadata.num_prefills else {}),
            **(decodes if metadata.num_decodes else {}),
        )

    @staticmethod
    def orders(metadata: Any) -> Sequence[Sequence[str]]:
        """Return the kernels that a layer may launch, in order."""
        prompts = _PROMPTS if metadata.num_prefills else ()
        return [[*prompts, *(_DECODES if metadata.num_decodes else ())]]

    def prepare(self, metadata: Any, own: Tensors) -> None:
        """Prepare the buffers of prompts: states behind each chunk, and behind each prompt."""
        if not metadata.num_prefills:
            return
        if metadata.prep_initial_states:
            self.initial = self.buffer(_SCAN, "initstates_ptr")
        #: ``[chunks, heads, dim, states]``
        self._states = self.buffer(_SCAN, "states_ptr")
        #: ``[prompts, heads, dim, states]``
        self._ends = self._states.new_empty((metadata.num_prefills, *self._states.shape[1:]))
        self._last = metadata.last_chunk_indices_p

    def compute(self, layer: Any, own: Tensors, shared: Any, addresses: dict[str, int]) -> None:
        """Compute a layer as the first one was."""
        states = own["ssm_states"]
        if shared.blocks is not None:
            self.load(states, shared)
            self.launch(_PROMPTS, addresses)
            torch.index_select(self._states, 0, self._last, out=self._ends)
            # With prompts no row is padding, so that no block is negative.
            states.index_copy_(0, shared.blocks, self._ends)
        if _DECODES[0] in self.repeated:
            self.launch(_DECODES, addresses)
