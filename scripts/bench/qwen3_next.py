"""A Qwen3-Next without experts, which vLLM's own class asks for (:func:`bench.models.register`)."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.qwen3_next import Qwen3NextForCausalLM


class DenseQwen3NextForCausalLM(Qwen3NextForCausalLM):  # type: ignore[misc]
    """Gated delta nets, attention in every fourth layer, and one MLP per layer."""

    def set_moe_parameters(self) -> None:
        """Count no experts."""
        self.expert_weights: list[Any] = []
        self.moe_layers: list[Any] = []
        self.num_moe_layers = 0
