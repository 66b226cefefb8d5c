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
from vllm.v1.readiness.feature import Feature
from vllm.v1.readiness.inputs.uploads import upload

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class EmptyStates(Feature):
    """Zeroes the Mamba states of requests whose first step has one token."""

    pooling = True

    def __init__(self, batch: "InputBatch") -> None:
        super().__init__(batch)
        #: Result of :func:`_groups`; None before the first step.
        self._groups: list[int] | None = None

    def empty_states(self, runner: "GPUModelRunner", lengths: np.ndarray) -> None:
        """See :meth:`Feature.empty_states`."""
        if self._groups is None:
            hybrid = runner.kv_cache_config.has_mamba_layers
            self._groups = list(_groups(runner)) if hybrid else []
        if not self._groups:
            return
        batch = runner.input_batch
        first = (batch.num_computed_tokens_cpu[: batch.num_reqs] == 0) & (lengths == 1)
        if not first.any():
            return
        for number in self._groups:
            # The first block holds the state up to the first token, in every cache mode.
            blocks = batch.block_table[number].block_table.np[: batch.num_reqs, 0][first]
            index = upload(blocks, torch.int64, runner.device, runner.pin_memory)
            for name in runner.kv_cache_config.kv_cache_groups[number].layer_names:
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
