"""Fix ``empty-states``: a prompt of one token starts from an empty Mamba state.

In 0.22.0 gated delta nets (Qwen3-Next, Qwen3.5, Kimi-Linear) and linear attention (MiniMax,
Bailing) treat every row of one token as a decode, which continues from the state in its block. For
a prompt or first prefill chunk of one token, this is the state of the block's previous request.
Here the state is zeroed first. (https://github.com/vllm-project/vllm/issues/51562)
"""

# mirrors: vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder.build
# mirrors: vllm.v1.attention.backends.linear_attn:LinearAttentionMetadataBuilder.build

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch
from vllm.v1.readiness.inputs.uploads import upload

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def zero(runner: "GPUModelRunner", lengths: np.ndarray) -> None:
    """Zero the Mamba states of requests whose first step has one token.

    ``lengths`` [requests] is the number of tokens per request in the step.
    """
    config = runner.kv_cache_config
    if not config.has_mamba_layers or registry.EMPTY_STATES not in switch.enabled():
        return
    batch = runner.input_batch
    first = (batch.num_computed_tokens_cpu[: batch.num_reqs] == 0) & (lengths == 1)
    if not first.any():
        return
    for number in _groups(runner):
        # The first block holds the state up to the first token, in every cache mode.
        blocks = batch.block_table[number].block_table.np[: batch.num_reqs, 0][first]
        index = upload(blocks, torch.int64, runner.device, runner.pin_memory)
        for name in config.kv_cache_groups[number].layer_names:
            states = runner.compilation_config.static_forward_context[name].kv_cache
            for state in [states] if isinstance(states, torch.Tensor) else states:
                state.index_fill_(0, index, 0)


def _groups(runner: "GPUModelRunner") -> Iterator[int]:
    """Yield the KV cache groups whose builders treat every row of one token as a decode."""
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
    from vllm.v1.attention.backends.linear_attn import LinearAttentionMetadataBuilder

    kinds = (GDNAttentionMetadataBuilder, LinearAttentionMetadataBuilder)
    for number, groups in enumerate(runner.attn_groups):
        if any(issubclass(group.backend.get_builder_cls(), kinds) for group in groups):
            yield number
