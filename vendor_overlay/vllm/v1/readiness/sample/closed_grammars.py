"""Fix ``closed-grammars``: a grammar that is complete may end its request before ``min_tokens``.

Once a grammar is complete, it allows nothing but a stop token. In 0.22.0 ``min_tokens`` forbids
just those, so that no token is left: whatever is sampled then breaks the grammar, and the request
ends with an error. Here the grammar has the last word: where forbidding the stop tokens would
leave no token, they stay allowed, and the request stops at one. The rows in question are compared
on the device, and nobody waits.
(https://github.com/vllm-project/vllm/issues/53665)
"""

# mirrors: vllm.v1.core.sched.utils:check_stop
# mirrors: vllm.v1.sample.logits_processor.builtin:MinTokensLogitsProcessor

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch
from vllm.v1.readiness.feature import Feature
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.readiness.live import LiveBatch
    from vllm.v1.request import Request
    from vllm.v1.sample.logits_processor.interface import BatchUpdate


def stops(request: "Request") -> bool:
    """Whether the newest token ends a request that has fewer than its ``min_tokens``.

    With a grammar, such a request is given a stop token only if nothing else was left.
    """
    params = request.sampling_params
    if not request.use_structured_output or params is None:
        return False
    newest = request.output_token_ids[-1]
    if newest != params.eos_token_id and newest not in (params.stop_token_ids or ()):
        return False
    return registry.CLOSED_GRAMMARS in switch.enabled()


class ClosedGrammars(Feature):
    """The fix for a batch: a logits processor of its own."""

    @classmethod
    def make(cls, live: "LiveBatch") -> None:
        """Replace a batch's logits processor for ``min_tokens``, if it is upstream's own."""
        processors = live.batch.logitsprocs.non_argmax_invariant
        for index, processor in enumerate(processors):
            if type(processor) is MinTokensLogitsProcessor:
                processors[index] = MinTokens(processor)


class _StopTokens(set[int]):
    """The stop tokens of a request with a grammar; upstream moves them from row to row."""


class _Guarded(NamedTuple):
    """Rows of logits with a grammar, and their stop tokens.

    Attributes:
        rows: [rows] their indices.
        positions: two tensors [entries]: row and token of each stop token.
        owners: [entries] the index within ``rows`` of each entry.
    """

    rows: torch.Tensor
    positions: tuple[torch.Tensor, torch.Tensor]
    owners: torch.Tensor


class MinTokens(MinTokensLogitsProcessor):  # type: ignore[misc]
    """Upstream's processor, which gives way where a grammar leaves only stop tokens.

    Args:
        processor: upstream's, whose attributes this one takes over.
    """

    def __init__(self, processor: MinTokensLogitsProcessor) -> None:
        self.__dict__.update(processor.__dict__)
        #: None if no row has both a grammar and ``min_tokens`` to come.
        self._guarded: _Guarded | None = None

    @staticmethod
    def add_request(
        params: "SamplingParams", prompt: list[int] | None, output: list[int]
    ) -> tuple[int, Sequence[int], set[int]] | None:
        """Take in a request as upstream does, and mark one that has a grammar."""
        entry = MinTokensLogitsProcessor.add_request(params, prompt, output)
        if entry is None or params.structured_outputs is None:
            return entry  # type: ignore[no-any-return]
        return entry[0], entry[1], _StopTokens(entry[2])

    def update_state(self, batch_update: "BatchUpdate | None") -> None:
        """Follow the batch as upstream does."""
        before = self.logits_slice
        super().update_state(batch_update)
        if self.logits_slice is not before:
            self._guarded = self._guard((row, row) for row in self.min_toks)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Mask stop tokens, unless nothing else is left to a row with a grammar.

        Args:
            logits: [rows, vocab], changed in place.
        """
        if self._guarded is None:
            return super().apply(logits)
        return _mask(logits, self._guarded, super().apply)

    def apply_with_spec_decode(
        self, logits: torch.Tensor, num_draft_tokens: list[int]
    ) -> torch.Tensor:
        """Do the same at the positions of drafts.

        Args:
            logits: [drafts of all rows, vocab], changed in place.
            num_draft_tokens: the number of drafts of each row.
        """
        upstream = super().apply_with_spec_decode
        guarded = None
        if self._guarded is not None:
            ends = list(accumulate(num_draft_tokens))
            guarded = self._guard(
                (row, position)
                for row in self.min_toks
                for position in range(ends[row] - num_draft_tokens[row], ends[row])
            )
        if guarded is None:
            return upstream(logits, num_draft_tokens)
        return _mask(logits, guarded, lambda logits: upstream(logits, num_draft_tokens))

    def _guard(self, positions: Iterable[tuple[int, int]]) -> _Guarded | None:
        """Upload the positions that belong to rows with a grammar.

        Args:
            positions: pairs of a batch's row, and of its row within the logits.
        """
        rows: list[int] = []
        entries: list[tuple[int, int, int]] = []
        for row, position in positions:
            stop_tokens = self.min_toks[row][2]
            if isinstance(stop_tokens, _StopTokens) and stop_tokens:
                entries += [(position, token, len(rows)) for token in stop_tokens]
                rows.append(position)
        if not rows:
            return None
        at, tokens, owners = (
            self._device_tensor(list(column), torch.int32) for column in zip(*entries, strict=True)
        )
        return _Guarded(self._device_tensor(rows, torch.int32), (at, tokens), owners)


def _mask(
    logits: torch.Tensor, guarded: _Guarded, mask: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Mask stop tokens, and unmask those of guarded rows that have no token left."""
    before = logits[guarded.positions]
    logits = mask(logits)
    closed = logits[guarded.rows].amax(dim=-1) == -torch.inf
    after = logits[guarded.positions]
    return logits.index_put_(guarded.positions, torch.where(closed[guarded.owners], before, after))
