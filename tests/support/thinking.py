"""Markers of thinking for models without a tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config.reasoning import ReasoningConfig

START = [5, 6]
END = [7, 8]


def config() -> ReasoningConfig:
    """Return the markers as the engine takes them; vLLM would make them from text."""
    from vllm.config.reasoning import ReasoningConfig

    reasoning = ReasoningConfig()
    reasoning._reasoning_start_token_ids = START
    reasoning._reasoning_end_token_ids = END
    return reasoning


def unpin() -> None:
    """Make forced tokens go without pinned memory in this process.

    Stock pins it whatever the platform, and fails where there is no driver. The overlay's fix
    cpu-pinning is left alone. In a process that vLLM starts, this serves as a general plugin.
    """
    from vllm.utils import torch_utils

    readiness = getattr(torch_utils, "readiness", None)
    if readiness is None or not readiness.pinning.lacking():
        torch_utils.async_tensor_h2d.__defaults__ = (False,)


def ended(tokens: list[int]) -> bool:
    """Return whether the end marker is among ``tokens``."""
    return any(tokens[n : n + len(END)] == END for n in range(len(tokens)))
