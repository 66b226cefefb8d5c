"""Readers: the consumers that need the newest tokens on the host, each of which rows.

A new consumer is one more case in :func:`readers`, with an owner in :mod:`fences`. Before
each step is sampled, the rows that somebody reads are settled in the reader's name.

Also here is the fix ``plugin-processors``. 0.22.0 counts a logits processor as a reader if
it is named when the engine is created, but not if it comes from an entry point
(``vllm.logits_processors``): under async scheduling the output lists that such a processor
is given keep a placeholder for every sampled token.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.readiness import closed_grammars, features, fences
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)

if TYPE_CHECKING:
    from vllm.v1.readiness.live import LiveBatch
    from vllm.v1.worker.gpu_input_batch import InputBatch

logger = init_logger(__name__)

#: vLLM's own logits processors, which do not read output tokens.
_OWN_PROCESSORS = (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
    closed_grammars.MinTokens,
)

#: The owner of a fence, and the rows that it needs.
Reader = tuple[str, Iterable[int]]


def readers(live: "LiveBatch") -> Iterator[Reader]:
    """List who needs the newest token of which rows on the host, for the step to be sampled."""
    batch = live.batch
    if batch.bad_words_token_ids and not (live.bad_words and live.bad_words.serving):
        yield fences.BAD_WORDS, batch.bad_words_token_ids
    if batch.logitsprocs_need_output_token_ids and not _only_thinking_needs(live):
        yield fences.LOGITS_PROCESSORS, range(batch.num_reqs)
    holder = batch.thinking_budget_state_holder
    if live.thinking is not None:
        if rows := list(live.thinking.waiting()):
            yield fences.THINKING_BUDGET, rows
    elif holder is not None and holder.has_tracked_requests():
        yield fences.THINKING_BUDGET, range(batch.num_reqs)
    if not batch.no_penalties and not (live.penalties and live.penalties.serving):
        yield fences.PENALTIES, range(batch.num_reqs)


def counters(live: "LiveBatch") -> Iterator[Reader]:
    """List who needs to know how many tokens which rows have.

    The host knows that without the tokens, unless it depends on how many drafts were
    accepted. Then upstream waits where it keeps the lists, whatever it keeps them for, and
    elsewhere assumes that all drafts were accepted.
    """
    batch, history = live.batch, live.history
    if history is None or not history.drafted:
        return
    if not history.in_flight[-1].metadata.output_token_ids:
        return
    if not batch.sampling_metadata.output_token_ids:
        return
    for processor in batch.logitsprocs.non_argmax_invariant:
        if isinstance(processor, MinTokensLogitsProcessor):
            yield fences.MIN_TOKENS, processor.min_toks


def _only_thinking_needs(live: "LiveBatch") -> bool:
    """Whether upstream counts logits processors as readers only because of thinking budgets."""
    return live.thinking is not None and all(
        type(processor) in _OWN_PROCESSORS for processor in live.batch.logitsprocs.all
    )


def count_plugin_processors(batch: "InputBatch", on: frozenset[str]) -> frozenset[str]:
    """Count logits processors from entry points as readers, if there are any.

    Args:
        batch: just constructed; its flag ``logitsprocs_need_output_token_ids`` is set.
        on: the features and fixes that are on.

    Returns:
        Those that stay on. With ``plugin-processors`` off and such a processor present,
        upstream's code keeps the history, so that the processor is given stock's lists.
    """
    if batch.logitsprocs_need_output_token_ids or all(
        type(processor) in _OWN_PROCESSORS for processor in batch.logitsprocs.all
    ):
        return on
    if features.PLUGIN_PROCESSORS in on:
        batch.logitsprocs_need_output_token_ids = True
        return on
    left = features.without([features.HISTORY], on)
    if left != on:
        logger.info_once(
            "Readiness overlay: also off: %s. A logits processor comes from an entry point, and "
            "plugin-processors is off.",
            ", ".join(sorted(on - left)),
        )
    return left
