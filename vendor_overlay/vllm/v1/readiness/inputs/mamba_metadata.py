"""Feature ``mamba-metadata``: the host knows whether prompts of Mamba 2 continue from a state.

The layers of Mamba 2 read the states of a step's prompts only if one of these continues from a
state: a later chunk, or a prompt behind a cached prefix. Upstream asks the device, so that in every
step with a prompt the host waits until all earlier work there has ended. The host has the lengths
that this follows from; upstream derives the chunks of the same step from them.
"""

# mirrors: vllm.v1.attention.backends.mamba2_attn:Mamba2AttentionMetadataBuilder.build
# mirrors: vllm.v1.attention.backends.mamba_attn:BaseMambaAttentionMetadataBuilder

from typing import TYPE_CHECKING

import torch
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadata


def continued(
    metadata: "Mamba2AttentionMetadata", common: "CommonAttentionMetadata"
) -> torch.Tensor:
    """Return which prompts of a step continue from a state, bool [prompts].

    Args:
        metadata: of the layers, with at least one prompt; prompts are its last rows.
        common: of all layers. On the host, its lengths may be too large by rejected drafts, but not
            for a request that begins: this one's length is its tokens in the step.
    """
    lengths = common.seq_lens_cpu_upper_bound
    assert lengths is not None and metadata.has_initial_states_p is not None  # as upstream does
    if registry.MAMBA_METADATA not in switch.enabled():
        return metadata.has_initial_states_p
    prompts = slice(metadata.num_reqs - metadata.num_prefills, metadata.num_reqs)
    return lengths[prompts] > common.query_start_loc_cpu.diff()[prompts]
