"""A Qwen3-Next without experts, which vLLM's own class asks for."""

from __future__ import annotations

from typing import Any

from vllm import ModelRegistry
from vllm.model_executor.models.qwen3_next import Qwen3NextForCausalLM

NAME = "DenseQwen3NextForCausalLM"


class DenseQwen3NextForCausalLM(Qwen3NextForCausalLM):  # type: ignore[misc]
    """Gated delta nets, attention in every fourth layer, and one MLP per layer."""

    def set_moe_parameters(self) -> None:
        """Count no experts."""
        self.expert_weights: list[Any] = []
        self.moe_layers: list[Any] = []
        self.num_moe_layers = 0


def register() -> None:
    """Make the class known to vLLM in this process and those that it forks."""
    ModelRegistry.register_model(NAME, f"{__name__}:{NAME}")
