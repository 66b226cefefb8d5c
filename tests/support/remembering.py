"""An engine that may remember: vLLM's LLMEngine as far as the benchmark's driver needs it."""

import hashlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from bench.engines.driver import Engine
from bench.engines.rows import Row


class Remembering:
    """Makes each token from all tokens before it, and counts those that it had made before.

    Attributes:
        recalled: tokens that it need not have computed, after all prompts that it was given.
    """

    def __init__(self) -> None:
        self.recalled = 0
        self.prompts: list[tuple[int, ...]] = []
        self._known: dict[tuple[int, ...], int] = {}
        self._running: dict[str, tuple[list[int], list[int], Any]] = {}

    def add_request(self, name: str, prompt: Any, sampling: Any) -> None:
        self.prompts.append(tuple(prompt["prompt_token_ids"]))
        self._running[name] = (list(prompt["prompt_token_ids"]), [], sampling)

    def has_unfinished_requests(self) -> bool:
        return bool(self._running)

    def step(self) -> Sequence[Any]:
        ended = []
        for name, (prompt, tokens, sampling) in list(self._running.items()):
            tokens.append(self._token((*prompt, *tokens)))
            if len(tokens) == sampling.max_tokens:
                del self._running[name]
                piece = SimpleNamespace(token_ids=tokens, logprobs=None)
                ended.append(SimpleNamespace(request_id=name, outputs=[piece]))
        return ended

    def _token(self, context: tuple[int, ...]) -> int:
        if context in self._known:
            self.recalled += 1
        else:
            digest = hashlib.sha256(str(context).encode()).digest()
            self._known[context] = 3 + int.from_bytes(digest[:2], "big") % 900
        return self._known[context]

    def collective_rpc(self, function: Any) -> None:
        pass


def driven(row: Row) -> tuple[Engine, Remembering]:
    """A driver's engine that is made of this one."""
    engine = Engine.__new__(Engine)
    inner: Any = Remembering()
    engine.spec, engine.asynchronous, engine.slices = row.engine, False, None
    engine.stamps, engine.baseline = [], []
    engine._engine, engine._vocabulary, engine._text = inner, 1000, []
    step = inner.step

    def stamped() -> Sequence[Any]:
        batch = len(inner._running)
        result: Sequence[Any] = step()
        engine.stamps.append((len(engine.stamps), batch))
        return result

    inner.step = stamped
    return engine, inner
