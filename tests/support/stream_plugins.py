"""Plugins of vLLM for tests of streams: an engine that fails, and a replaced function."""

import time
from collections.abc import AsyncIterator
from typing import Any

#: Requests with one of these in their id fail.
FAILS = "fails"
#: Seconds added to a step: longer than a server needs for a chunk.
SLOWER = 0.01
#: Outputs before a failure.
BEFORE = 3


def failing() -> None:
    """Let the engine of this process take its time, and fail in the middle of some requests."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCore

    step = EngineCore.step

    def slow(self: Any) -> Any:
        time.sleep(SLOWER)
        return step(self)

    EngineCore.step = slow

    generate = AsyncLLM.generate

    async def failing_late(self: Any, *args: Any, **named: Any) -> AsyncIterator[Any]:
        request_id = str(args[2])
        number = 0
        async for output in generate(self, *args, **named):
            if FAILS in request_id and number == BEFORE:
                raise ValueError('failed: "é"')
            number += 1
            yield output

    AsyncLLM.generate = failing_late


def replacing() -> None:
    """Replace a function whose work the overlay does."""
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

    original = OpenAIServingChat._create_chat_logprobs

    def replaced(self: Any, *args: Any, **named: Any) -> Any:
        logprobs = original(self, *args, **named)
        for content in logprobs.content:
            content.token = f"<{content.token}>"
        return logprobs

    OpenAIServingChat._create_chat_logprobs = replaced
