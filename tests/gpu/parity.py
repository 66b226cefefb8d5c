"""A grammar without a library or a tokenizer: tokens at even places of an output are even.

The engine's manager takes it in place of a backend; the mask is applied as for any other.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch


def install(engine: Any) -> bool:
    """Give the engine, whose core runs in this process, the grammar for every request of one.

    Returns:
        Whether masks can be applied here; that takes xgrammar.
    """
    from vllm import SamplingParams

    try:
        importlib.import_module("xgrammar")
    except (ImportError, OSError, RuntimeError):
        return False
    SamplingParams._validate_structured_outputs = lambda *_: None  # it asks for a tokenizer
    manager = engine.engine_core.engine_core.scheduler.structured_output_manager
    manager.backend = Backend(manager.vllm_config.model_config.get_vocab_size())
    # Compiled in a thread, it would let a request join whenever that is done.
    manager._use_async_grammar_compilation = False
    return True


class Backend:
    """The engine's part."""

    def __init__(self, vocabulary: int) -> None:
        self.words = -(-vocabulary // 32)

    def compile_grammar(self, *_: object) -> Parity:
        """Return a request's grammar, whatever it asks for."""
        return Parity()

    def allocate_token_bitmask(self, rows: int) -> torch.Tensor:
        """Return masks, int32 [rows, words]."""
        return torch.full((rows, self.words), -1, dtype=torch.int32)

    def destroy(self) -> None:
        """Do nothing."""


class Parity:
    """A request's part, at some place of its output."""

    def __init__(self) -> None:
        self.place = 0

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """Return the first tokens, as far as they are allowed."""
        valid = [n for n, token in enumerate(tokens, self.place) if (token - n) % 2 == 0]
        count = next((k for k, n in enumerate(valid) if n != self.place + k), len(valid))
        return tokens[:count]

    def accept_tokens(self, request: str, tokens: list[int]) -> bool:
        """Advance, if all tokens are allowed."""
        del request
        accepted = len(self.validate_tokens(tokens)) == len(tokens)
        self.place += len(tokens) if accepted else 0
        return accepted

    def rollback(self, count: int) -> None:
        """Go back."""
        self.place -= count

    def fill_bitmask(self, masks: torch.Tensor, row: int) -> None:
        """Fill the mask of the next token."""
        bits = 0xAAAAAAAA if self.place % 2 else 0x55555555
        masks.numpy()[row] = np.uint32(bits).view(np.int32)

    def is_terminated(self) -> bool:
        """Return False: outputs end by their length."""
        return False

    def reset(self) -> None:
        """Begin anew."""
        self.place = 0
