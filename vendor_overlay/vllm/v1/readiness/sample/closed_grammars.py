"""Fix ``closed-grammars``: a complete grammar may end its request before ``min_tokens``.

A complete grammar allows only stop tokens, which ``min_tokens`` forbids. In 0.22.0 no token is
left, so any sampled token breaks the grammar, and the request ends with an error. Here the grammar
takes precedence: if masking the stop tokens would leave no token, they stay allowed, and the
request stops. The rows are checked on the device, without a sync.
(https://github.com/vllm-project/vllm/issues/53665)
"""

# mirrors: vllm.v1.core.sched.utils:check_stop
# mirrors: vllm.v1.sample.logits_processor.builtin:MinTokensLogitsProcessor

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from vllm.v1.readiness import registry
from vllm.v1.readiness.core.grammar_stops import is_text
from vllm.v1.readiness.engine import switch
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request
    from vllm.v1.sample.logits_processor.interface import BatchUpdate
    from vllm.v1.worker.gpu_input_batch import InputBatch


def stops(request: "Request") -> bool:
    """Return whether the newest token ends a request that has not reached its ``min_tokens``.

    A request with a grammar samples a stop token so early only if no other token was allowed. It
    does not end where the token is text of the grammar.
    """
    params = request.sampling_params
    if not request.use_structured_output or params is None:
        return False
    newest = request.output_token_ids[-1]
    if newest != params.eos_token_id and newest not in (params.stop_token_ids or ()):
        return False
    return registry.CLOSED_GRAMMARS in switch.enabled() and not is_text(request)


def install(batch: "InputBatch") -> None:
    """Replace upstream's logits processor for ``min_tokens`` in a batch."""
    processors = batch.logitsprocs.non_argmax_invariant
    for index, processor in enumerate(processors):
        if type(processor) is MinTokensLogitsProcessor:
            processors[index] = MinTokens(processor)


class _StopTokens(set[int]):
    """Stop tokens of a request with a grammar; upstream moves them with the request's row."""


class _Guarded(NamedTuple):
    """Rows of the logits in which stop tokens stay allowed if no other token is left."""

    rows: torch.Tensor  # [rows], indices into the logits
    positions: tuple[torch.Tensor, torch.Tensor]  # [stop tokens] each: logits rows, token ids
    owners: torch.Tensor  # [stop tokens], indices into ``rows``


class MinTokens(MinTokensLogitsProcessor):  # type: ignore[misc]
    """Upstream's processor, but a stop token stays if a grammar allows nothing else."""

    def __init__(self, processor: MinTokensLogitsProcessor) -> None:
        self.__dict__.update(processor.__dict__)
        #: None unless a row with a grammar has not reached its ``min_tokens``.
        self._guarded: _Guarded | None = None

    @staticmethod
    def add_request(
        params: "SamplingParams", prompt: list[int] | None, output: list[int]
    ) -> tuple[int, Sequence[int], set[int]] | None:
        """Return the state of a request, with marked stop tokens if it has a grammar."""
        entry = MinTokensLogitsProcessor.add_request(params, prompt, output)
        if entry is None or params.structured_outputs is None:
            return entry  # type: ignore[no-any-return]
        return entry[0], entry[1], _StopTokens(entry[2])

    def update_state(self, batch_update: "BatchUpdate | None") -> None:
        """Apply the batch's changes, and find the rows with a grammar."""
        before = self.logits_slice
        super().update_state(batch_update)
        if self.logits_slice is not before:
            self._guarded = self._guard((row, row) for row in self.min_toks)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Mask stop tokens in logits [rows, vocab], unless a grammar allows nothing else."""
        if self._guarded is None:
            return super().apply(logits)
        return _mask(logits, self._guarded, super().apply)

    def apply_with_spec_decode(
        self, logits: torch.Tensor, num_draft_tokens: list[int]
    ) -> torch.Tensor:
        """Mask stop tokens in target logits [drafts of all rows, vocab]."""
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
        """Select the rows with a grammar from pairs of a batch row and a logits row."""
        rows: list[int] = []
        entries: list[tuple[int, int, int]] = []
        for row, position in positions:
            stop_tokens = self.min_toks[row][2]
            if isinstance(stop_tokens, _StopTokens) and stop_tokens:
                entries += [(position, token, len(rows)) for token in stop_tokens]
                rows.append(position)
        if not rows:
            return None
        targets, tokens, owners = (
            self._device_tensor(list(column), torch.int32) for column in zip(*entries, strict=True)
        )
        return _Guarded(self._device_tensor(rows, torch.int32), (targets, tokens), owners)


def _mask(
    logits: torch.Tensor, guarded: _Guarded, mask: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Mask stop tokens, except in guarded rows in which no other token is allowed."""
    before = logits[guarded.positions]
    logits = mask(logits)
    closed = logits[guarded.rows].amax(dim=-1) == -torch.inf
    after = logits[guarded.positions]
    return logits.index_put_(guarded.positions, torch.where(closed[guarded.owners], before, after))
