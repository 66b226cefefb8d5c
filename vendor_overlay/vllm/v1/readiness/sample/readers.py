"""Readers: host-side consumers of the newest tokens, and the rows that each needs.

Before a step is sampled, the rows that :func:`readers` yields are settled; each wait has an owner
from :mod:`fences`. A user's logits processor may declare by the class attribute :data:`READS` that
it does not read the newest token. The host then does not wait for that processor.

This module also contains the fix ``plugin-processors``. 0.22.0 counts a logits processor as a
reader if the engine's arguments name it, but not if it comes from an entry point
(``vllm.logits_processors``). Under async scheduling, such a processor finds a placeholder for every
sampled token in the output lists.
"""

# mirrors: vllm.v1.worker.gpu_input_batch:InputBatch.update_async_output_token_ids
# mirrors: vllm.v1.worker.gpu_input_batch:InputBatch._make_sampling_metadata
# mirrors: vllm.v1.sample.logits_processor.builtin:MinPLogitsProcessor
# mirrors: vllm.v1.sample.logits_processor.builtin:LogitBiasLogitsProcessor
# mirrors: vllm.v1.sample.logits_processor.builtin:MinTokensLogitsProcessor

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import fences, subclasses
from vllm.v1.readiness.sample import closed_grammars
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)

if TYPE_CHECKING:
    from vllm.v1.readiness.live import LiveBatch
    from vllm.v1.worker.gpu_input_batch import InputBatch

logger = init_logger(__name__)

#: vLLM's own logits processors. None of them reads output tokens.
_OWN_PROCESSORS = (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
    closed_grammars.MinTokens,
)

#: Name of the class attribute by which a logits processor declares the output tokens it reads.
READS = "readiness_reads"
#: Values of READS: all tokens, all but the newest token of each request, or only their number.
NEWEST, OLDER, NONE = "newest", "older", "none"

#: Owner of a fence, and the rows that the owner needs.
Reader = tuple[str, Iterable[int]]


def readers(live: "LiveBatch") -> Iterator[Reader]:
    """Yield the readers of the step to be sampled next."""
    batch = live.batch
    if batch.bad_words_token_ids and not (live.bad_words and live.bad_words.serving):
        yield fences.BAD_WORDS, batch.bad_words_token_ids
    if batch.logitsprocs_need_output_token_ids and _processors_read(live):
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
    """Yield the host-side consumers of the number of tokens of a row.

    The host knows this number before the tokens, unless it depends on how many drafts are accepted.
    Upstream then waits if it keeps output lists, and otherwise assumes that all are accepted.
    """
    batch, history = live.batch, live.history
    if history is None or not history.drafted:
        return
    newest = history.in_flight[-1].metadata
    if not (newest.output_token_ids and batch.sampling_metadata.output_token_ids):
        return
    for processor in batch.logitsprocs.non_argmax_invariant:
        if isinstance(processor, MinTokensLogitsProcessor):
            yield fences.MIN_TOKENS, processor.min_toks


def _processors_read(live: "LiveBatch") -> bool:
    """Return whether a logits processor reads the newest tokens.

    With thinking budgets, upstream counts its own processors as readers, too.
    """
    others = _others(live.batch)
    if not others:
        return live.thinking is None
    return any(getattr(type(processor), READS, NEWEST) == NEWEST for processor in others)


def _others(batch: "InputBatch") -> list[object]:
    """Return the logits processors that are not part of vLLM."""
    processors = batch.logitsprocs.all
    return [processor for processor in processors if type(processor) not in _OWN_PROCESSORS]


def check_declarations(batch: "InputBatch") -> None:
    """Raise ValueError if a logits processor declares an unknown value of :data:`READS`."""
    for processor in _others(batch):
        declared = getattr(type(processor), READS, NEWEST)
        if declared not in (NEWEST, OLDER, NONE):
            raise ValueError(
                f"{subclasses.full_name(type(processor))}.{READS} is {declared!r}. Set it to "
                f"{NEWEST!r}, {OLDER!r} or {NONE!r} (docs/features.md of the readiness overlay)."
            )


def count_plugin_processors(batch: "InputBatch", on: frozenset[str]) -> frozenset[str]:
    """Count logits processors from entry points as readers; return the features to keep on.

    If there is such a processor and ``plugin-processors`` is off, ``history`` is disabled, and the
    processor receives upstream's lists. Called after the batch has been constructed.
    """
    if batch.logitsprocs_need_output_token_ids or not _others(batch):
        return on
    if registry.PLUGIN_PROCESSORS in on:
        batch.logitsprocs_need_output_token_ids = True
        return on
    left = registry.without([registry.HISTORY], on)
    if left != on:
        logger.info_once(
            "Readiness overlay: %s disabled, because a logits processor comes from an entry point "
            "and plugin-processors is off.",
            ", ".join(sorted(on - left)),
        )
    return left
