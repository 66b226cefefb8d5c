"""Fix ``stop-strings``: a reply ends with the token that completes its first stop string.

With drafts, one step may bring several tokens. 0.22.0 detokenizes all of them before it searches
for stop strings: the reply keeps the ids and logprobs of tokens behind the stop string, and a stop
string that comes first in the request's list wins over one that comes first in the text, also
within one token. Here each token is checked as if it had come alone, the stop string that is
complete first wins, and later tokens are dropped with their logprobs.
(https://github.com/vllm-project/vllm/issues/47616)
"""

# mirrors: vllm.v1.engine.detokenizer:BaseIncrementalDetokenizer.update
# mirrors: vllm.v1.engine.detokenizer:check_stop_strings
# mirrors: vllm.v1.engine.output_processor:OutputProcessor.process_outputs

from typing import TYPE_CHECKING, cast

from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer, IncrementalDetokenizer
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import originals, switch

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import RequestState


def update(state: "RequestState", output: EngineCoreOutput) -> str | None:
    """Detokenize a request's new tokens; return the stop string that they complete, or None.

    Drops the tokens behind the stop string from ``output`` and from ``state``.
    """
    tokens, stopped = output.new_token_ids, output.finish_reason == FinishReason.STOP
    detokenizer: IncrementalDetokenizer = state.detokenizer
    if not _serves(detokenizer, len(tokens)):
        return cast("str | None", detokenizer.update(tokens, stopped))
    for kept, token in enumerate(tokens, 1):
        searched = len(detokenizer.output_text)
        stops, detokenizer.stop = detokenizer.stop, []
        try:
            detokenizer.update([token], stopped and kept == len(tokens))
        finally:
            detokenizer.stop = stops
        if detokenizer.num_output_tokens() <= detokenizer.min_tokens:
            continue
        found = _first(detokenizer.output_text, searched, stops)
        if found is None:
            continue
        end, stop = found
        if not detokenizer.include_stop_str_in_output:
            end -= len(stop)
        detokenizer.output_text = detokenizer.output_text[:end]
        _drop(state, output, kept)
        return stop
    return None


def _serves(detokenizer: IncrementalDetokenizer, count: int) -> bool:
    """Return whether ``count`` new tokens may contain a stop string that upstream misplaces."""
    if not isinstance(detokenizer, BaseIncrementalDetokenizer) or not count:
        return False
    stops = len(detokenizer.stop)
    if not stops or (count == 1 and stops == 1):
        return False
    return registry.STOP_STRINGS in switch.enabled() and originals.all_vllms(
        detokenizer, ("update", "num_output_tokens")
    )


def _first(text: str, searched: int, stops: list[str]) -> tuple[int, str] | None:
    """Return the end and text of the stop string that ends first behind ``searched`` characters.

    Of several with the same end, the first in the list wins, as in upstream.
    """
    best: tuple[int, str] | None = None
    for stop in stops:
        begin = text.find(stop, max(0, searched - len(stop) + 1))
        if begin >= 0 and (best is None or begin + len(stop) < best[0]):
            best = begin + len(stop), stop
    return best


def _drop(state: "RequestState", output: EngineCoreOutput, kept: int) -> None:
    """Drop all but the first ``kept`` tokens of a step's output."""
    dropped = len(output.new_token_ids) - kept
    if not dropped:
        return
    del output.new_token_ids[kept:]
    if output.new_logprobs is not None:
        output.new_logprobs = output.new_logprobs.slice_request(0, kept)
    if output.routed_experts is not None:
        state.routed_experts_chunks[-1] = output.routed_experts[:-dropped]
