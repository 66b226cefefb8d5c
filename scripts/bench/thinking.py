"""Markers of thinking for models that have no tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config.reasoning import ReasoningConfig

START = [5, 6]
END = [7, 8]


def config() -> ReasoningConfig:
    """The markers as the engine is told of them; it would make them from text."""
    from vllm.config.reasoning import ReasoningConfig

    made = ReasoningConfig()
    made._reasoning_start_token_ids = START
    made._reasoning_end_token_ids = END
    return made


def unpin() -> None:
    """Have this process force tokens without pinned memory.

    Stock pins it whatever the platform, and fails where there is no driver. In a process
    that vLLM starts, this serves as a general plugin.
    """
    from vllm.utils.torch_utils import async_tensor_h2d

    async_tensor_h2d.__defaults__ = (False,)


def ended(tokens: list[int]) -> bool:
    """Whether the marker of the end is among ``tokens``."""
    return any(tokens[at : at + len(END)] == END for at in range(len(tokens)))
