"""Readers: the consumers that need the newest tokens on the host, each of which rows.

A new consumer is one more case in :func:`readers`, with an owner in :mod:`fences`. Before
each step is sampled, the rows that somebody reads are settled in the reader's name.

A user's own logits processor may say by an attribute of its class, :data:`READS`, that it does
not read the newest token. Then nothing waits for it.

Also here is the fix ``plugin-processors``. 0.22.0 counts a logits processor as a reader if
it is named when the engine is created, but not if it comes from an entry point
(``vllm.logits_processors``): under async scheduling the output lists that such a processor
is given keep a placeholder for every sampled token.
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

#: vLLM's own logits processors, which do not read output tokens.
_OWN_PROCESSORS = (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
    closed_grammars.MinTokens,
)

#: What a logits processor's class says that it reads of the output lists that it is given.
READS = "readiness_reads"
#: Every token; those older than the newest of each request; nothing but how many there are.
NEWEST, OLDER, NONE = "newest", "older", "none"

#: The owner of a fence, and the rows that it needs.
Reader = tuple[str, Iterable[int]]


def readers(live: "LiveBatch") -> Iterator[Reader]:
    """List who needs the newest token of which rows on the host, for the step to be sampled."""
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


def _processors_read(live: "LiveBatch") -> bool:
    """Whether a logits processor reads the newest tokens.

    Upstream also counts its own as readers if there are thinking budgets.
    """
    others = _others(live.batch)
    if not others:
        return live.thinking is None
    return any(getattr(type(each), READS, NEWEST) == NEWEST for each in others)


def _others(batch: "InputBatch") -> list[object]:
    """The logits processors that are not vLLM's own."""
    return [each for each in batch.logitsprocs.all if type(each) not in _OWN_PROCESSORS]


def check_declarations(batch: "InputBatch") -> None:
    """Check what users' logits processors say that they read.

    Raises:
        ValueError: a class says something else than is known.
    """
    for processor in _others(batch):
        says = getattr(type(processor), READS, NEWEST)
        if says not in (NEWEST, OLDER, NONE):
            raise ValueError(
                f"{subclasses.full_name(type(processor))}.{READS} is {says!r}. Make it "
                f"{NEWEST!r}, {OLDER!r} or {NONE!r} (docs/features.md of the readiness overlay)."
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
    if batch.logitsprocs_need_output_token_ids or not _others(batch):
        return on
    if registry.PLUGIN_PROCESSORS in on:
        batch.logitsprocs_need_output_token_ids = True
        return on
    left = registry.without([registry.HISTORY], on)
    if left != on:
        logger.info_once(
            "Readiness overlay: also off: %s. A logits processor comes from an entry point, and "
            "plugin-processors is off.",
            ", ".join(sorted(on - left)),
        )
    return left
