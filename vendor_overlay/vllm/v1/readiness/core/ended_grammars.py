"""Fix ``closed-grammars``, ends: a grammar that has ended accepts every later token.

A grammar ends when it accepts its stop token. With ``ignore_eos``, or in a step with drafts, tokens
may follow that the grammar no longer restricts. In 0.22.0, xgrammar rejects them, and guidance does
if they arrive in one step with the stop token, so the request ends with an error. Outlines rejects
the stop token itself, although its bitmask allows only that token, and its check for the end
returns the previous call's value: from the second token on, a regex that may continue restricts
nothing. Here each backend's grammar ends with the stop token, and later tokens are unrestricted.
(https://github.com/vllm-project/vllm/issues/49173)
"""

# mirrors: vllm.v1.structured_output.backend_xgrammar:XgrammarGrammar
# mirrors: vllm.v1.structured_output.backend_guidance:GuidanceGrammar
# mirrors: vllm.v1.structured_output.backend_outlines:OutlinesGrammar
# mirrors: vllm.v1.structured_output.backend_lm_format_enforcer:LMFormatEnforcerGrammar

from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, cast

import torch
from vllm.v1.readiness import registry
from vllm.v1.readiness.core import grammar_stops
from vllm.v1.readiness.engine import switch
from vllm.v1.structured_output.backend_guidance import GuidanceGrammar
from vllm.v1.structured_output.backend_lm_format_enforcer import LMFormatEnforcerGrammar
from vllm.v1.structured_output.backend_outlines import OutlinesGrammar
from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.request import Request
    from vllm.v1.structured_output.backend_types import (
        StructuredOutputBackend,
        StructuredOutputGrammar,
    )

    Base = StructuredOutputGrammar
else:
    Base = object


@dataclass(slots=True)
class End:
    """End of a grammar: its attribute ``readiness``."""

    #: The request's stop tokens; None if only the grammar's own end stops it.
    stops: grammar_stops.Stops | None
    token: int | None = None  #: Stop token of Outlines' grammar; None for others, which know it.
    reached: bool = False  #: Whether Outlines' grammar has accepted it.


class _Ending(Base):  # type: ignore[misc, valid-type]
    """Mixin of a backend's grammar that accepts every token behind its end."""

    readiness: End

    def fill_bitmask(self, bitmask: torch.Tensor, idx: int) -> None:
        """Fill a row of the bitmask; stop tokens are masked until the grammar may end."""
        super().fill_bitmask(bitmask, idx)
        if self.readiness.stops is not None:
            self.readiness.stops.mask(bitmask[idx])

    def may_end(self, tokens: "Sequence[int]") -> bool:
        """Return whether the grammar may end, or has ended, behind further tokens."""
        stops = self.readiness.stops
        assert stops is not None
        accepted = 0
        try:
            for token in tokens:
                if self.is_terminated() or not self.accept_tokens("", [token]):
                    return True
                accepted += 1
            bitmask = torch.full((1, -(-stops.size // 32)), -1, dtype=torch.int32)
            if not self.is_terminated():
                super().fill_bitmask(bitmask, 0)
            return stops.may_end(bitmask[0])
        finally:
            if accepted:
                self.rollback(accepted)

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Advance the grammar up to its end; return whether it accepts the tokens up to there."""
        for token in tokens:
            if self.is_terminated():
                break
            if not super().accept_tokens(request_id, [token]):
                return False
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """Return the accepted prefix of ``tokens``, up to the grammar's end or a placeholder."""
        if self.is_terminated():
            return []
        drafts = [*takewhile(lambda token: token >= 0, tokens)]
        return cast("list[int]", super().validate_tokens(drafts))


class EndingXgrammar(_Ending, XgrammarGrammar):  # type: ignore[misc]
    """xgrammar's grammar."""


class EndingGuidance(_Ending, GuidanceGrammar):  # type: ignore[misc]
    """Guidance's grammar."""


class EndingLMFormatEnforcer(_Ending, LMFormatEnforcerGrammar):  # type: ignore[misc]
    """LM Format Enforcer's grammar, which ends if its newest token is the stop token."""


class EndingOutlines(_Ending, OutlinesGrammar):  # type: ignore[misc]
    """Outlines' grammar. Its guide never accepts the stop token, so the end is stored here."""

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Advance the guide, and end with a stop token in a final state."""
        for token in tokens:
            if self.readiness.reached:
                break
            if token != self.readiness.token:
                if not OutlinesGrammar.accept_tokens(self, request_id, [token]):
                    return False
            elif self.guide.is_finished():
                self.readiness.reached = True
                self.num_processed_tokens += 1
            else:
                return False
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """Return the accepted prefix of ``tokens``, which may end with the stop token."""
        accepted: list[int] = super().validate_tokens(tokens)
        rest = tokens[len(accepted) :]
        if not rest or rest[0] != self.readiness.token or self.readiness.reached:
            return accepted
        for token in accepted:
            self.guide.advance(token)
        finished = self.guide.is_finished()
        if accepted:
            self.guide.rollback_state(len(accepted))
        return [*accepted, self.readiness.token] if finished else accepted

    def rollback(self, num_tokens: int) -> None:
        """Undo the newest tokens, the stop token included."""
        if self.readiness.reached and num_tokens > 0:
            self.readiness.reached = False
            self.num_processed_tokens -= 1
            num_tokens -= 1
        if num_tokens > 0:
            super().rollback(num_tokens)

    def is_terminated(self) -> bool:
        """Return whether the stop token was accepted."""
        return self.readiness.reached

    def reset(self) -> None:
        """Return to the grammar's start."""
        super().reset()
        self.readiness.reached = False


_ENDING: "dict[type, type]" = {
    kind.__mro__[2]: kind
    for kind in (EndingXgrammar, EndingGuidance, EndingLMFormatEnforcer, EndingOutlines)
}


def ending(
    backend: "StructuredOutputBackend", grammar: "StructuredOutputGrammar", request: "Request"
) -> "StructuredOutputGrammar":
    """Return a newly compiled grammar with the right end; ``grammar`` if it is not vLLM's own."""
    kind = _ENDING.get(type(grammar))
    if kind is None or registry.CLOSED_GRAMMARS not in switch.enabled():
        return grammar
    ended: Any = object.__new__(kind)
    ended.__dict__.update(vars(grammar))
    ended.readiness = End(grammar_stops.of(backend, request))
    if kind is EndingOutlines:
        ended.readiness.token = backend.vocabulary.inner.get_eos_token_id()
    return cast("StructuredOutputGrammar", ended)
