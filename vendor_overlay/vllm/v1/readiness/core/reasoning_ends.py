"""Fix ``closed-grammars``, drafts: a grammar begins with the first token behind the reasoning.

With a reasoning parser, a grammar restricts only the tokens behind the reasoning. With drafts, a
step may accept the end of the reasoning and tokens behind it. In 0.22.0 these tokens are sampled
without a bitmask, and the grammar never accepts them, so the reply begins twice or breaks the
grammar; a structural tag accepts the tokens of the reasoning instead, and may end the request with
an error. If the end is not the step's last token, most parsers miss it, and the grammar restricts
nothing. Here each token is checked once, bitmasks begin behind a drafted end, and the grammar
accepts the tokens behind it. (https://github.com/vllm-project/vllm/issues/44006)
"""

# mirrors: vllm.v1.structured_output:StructuredOutputManager.grammar_bitmask
# mirrors: vllm.v1.structured_output:StructuredOutputManager.should_fill_bitmask
# mirrors: vllm.v1.structured_output:StructuredOutputManager.should_advance
# mirrors: vllm.v1.core.sched.scheduler:Scheduler.update_from_output

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, overload

from vllm.v1.readiness import registry
from vllm.v1.readiness.core import records
from vllm.v1.readiness.engine import switch

if TYPE_CHECKING:
    from vllm.reasoning import ReasoningParser
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager


class _Prefix(Sequence[int]):
    """The first ``end`` tokens of a request and drafts behind them, without a copy."""

    def __init__(self, tokens: Sequence[int], end: int) -> None:
        self._tokens, self.end = tokens, end
        self.drafts: list[int] = []

    def __len__(self) -> int:
        return self.end + len(self.drafts)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        places = range(len(self))[index]
        if isinstance(places, range):
            return [self[place] for place in places]
        return self._tokens[places] if places < self.end else self.drafts[places - self.end]

    def __iter__(self) -> Iterator[int]:
        return chain(islice(self._tokens, self.end), self.drafts)

    def __reversed__(self) -> Iterator[int]:
        later = len(self._tokens) - self.end
        return chain(reversed(self.drafts), islice(reversed(self._tokens), later, None))


def advances(
    manager: "StructuredOutputManager", reasoner: "ReasoningParser", request: "Request"
) -> bool | None:
    """Return whether the newest tokens contain tokens of the grammar; None to fall back.

    Called while the reasoning has not ended. Sets ``reasoning_ended`` if it has now.
    """
    if manager.vllm_config.speculative_config is None:
        return None  # upstream checks a step's only token
    if registry.CLOSED_GRAMMARS not in switch.enabled():
        return None
    structured = request.structured_output_request
    assert structured is not None
    tokens, record = request.all_token_ids, records.of(request)
    count = len(tokens)
    checked = request.num_prompt_tokens if record.checked is None else record.checked
    checked, record.checked = min(checked, count), count
    known = _Prefix(tokens, checked)
    for position in range(checked, count):
        known.end = position + 1
        if reasoner.is_reasoning_end_streaming(known, [tokens[position]]):
            structured.reasoning_ended = True
            record.begin = position + 1
            return position + 1 < count
    return False


def restricted(request: "Request", tokens: list[int]) -> list[int]:
    """Return the grammar's part of a request's newest tokens."""
    record = records.of(request)
    begin, record.begin = record.begin, None
    if begin is None:
        return tokens
    return tokens[max(begin - request.num_tokens, -len(tokens)) :]


def fill(
    manager: "StructuredOutputManager", request: "Request", row: int, drafts: list[int]
) -> bool:
    """Fill the bitmasks of a request whose drafts may end its reasoning; False to fall back.

    ``row`` is the index of the request's first bitmask. It has one per draft, and one more.
    """
    structured = request.structured_output_request
    if not drafts or structured is None or structured.reasoning_ended is not False:
        return False
    reasoner = manager._get_reasoner(request)
    if reasoner is None or manager.enable_in_reasoning:
        return False
    if registry.CLOSED_GRAMMARS not in switch.enabled():
        return False
    grammar, known = structured.grammar, _Prefix(request.all_token_ids, request.num_tokens)
    began, accepted = False, 0
    for draft in (*drafts, -1):
        manager._fill_bitmasks(((grammar, row, began),))
        row += 1
        if draft < 0:
            began, reasoner = False, None  # no later draft is accepted
        elif began:
            if not grammar.is_terminated() and grammar.validate_tokens([draft]):
                grammar.accept_tokens(request.request_id, [draft])
                accepted += 1
            elif not grammar.is_terminated():
                began, reasoner = False, None  # the sampler rejects this draft
        elif reasoner is not None:
            known.drafts.append(draft)
            began = reasoner.is_reasoning_end_streaming(known, [draft])
    if accepted:
        grammar.rollback(accepted)
    return True
