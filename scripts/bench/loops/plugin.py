"""A general plugin of vLLM: grammars without a tokenizer, and thinking budgets without a driver."""

from __future__ import annotations

from typing import Any

from bench import grammars, thinking


def register() -> None:
    """Prepare this process of an engine for the rows of :mod:`bench.loops.rows`."""
    from vllm import SamplingParams
    from vllm.platforms import current_platform
    from vllm.v1.structured_output import StructuredOutputManager

    if current_platform.is_cpu():
        thinking.unpin()
    SamplingParams._validate_structured_outputs = lambda *_: None  # it asks for a tokenizer
    begin = StructuredOutputManager.grammar_init

    def grammar_init(manager: Any, request: Any) -> None:
        # The first grammar makes the backend, as in vLLM: engines without grammars have none.
        if manager.backend is None and request.structured_output_request is not None:
            grammars.serve(manager, manager.vllm_config.model_config.get_vocab_size())
        begin(manager, request)

    StructuredOutputManager.grammar_init = grammar_init
