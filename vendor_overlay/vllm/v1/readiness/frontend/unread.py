"""Feature ``process-outputs``: an unread output of a request, made when its client takes it.

0.22.0 makes a RequestOutput and a CompletionOutput for each token, and merges them while the client
has not read them. Here a collector holds an :class:`Unread`, to which the tokens of further steps
are added. Its RequestOutput is made once, when it is taken or merged with an output of upstream.
"""

# mirrors: vllm.v1.engine.output_processor:RequestState.make_request_output
# mirrors: vllm.v1.engine.output_processor:RequestState._new_request_output
# mirrors: vllm.v1.engine.output_processor:RequestState._new_completion_output
# mirrors: vllm.v1.engine.output_processor:RequestOutputCollector
# mirrors: vllm.v1.engine.detokenizer:BaseIncrementalDetokenizer.get_next_output_text
# mirrors: vllm.outputs:RequestOutput
# mirrors: vllm.outputs:CompletionOutput

from typing import TYPE_CHECKING, Any

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer
from vllm.v1.readiness.frontend import logprobs

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import RequestOutputCollector, RequestState


_DELTA = RequestOutputKind.DELTA


class Unread:
    """Output of a request that continues, until its client takes it.

    Attributes:
        tokens: token ids of the steps since the last output that was taken.
    """

    __slots__ = ("_before", "_state", "tokens")

    def __init__(
        self, state: "RequestState", tokens: list[int], before: RequestOutput | None = None
    ) -> None:
        self._state = state
        self._before = before  # an unread output of upstream's
        self.tokens = tokens

    def make(self) -> RequestOutput:
        """Return the output that upstream would have merged from one per step."""
        state, tokens = self._state, self.tokens
        detokenizer, processor = state.detokenizer, state.logprobs_processor
        assert detokenizer is not None
        assert processor is not None
        delta = state.output_kind is _DELTA
        if delta and type(detokenizer) is FastIncrementalDetokenizer:
            text = detokenizer.output_text
            start = detokenizer._last_output_text_offset
            detokenizer._last_output_text_offset = len(text)
            text = text[start:]  # nothing is held back without stop strings
        else:
            text = detokenizer.get_next_output_text(False, delta)
        if not delta:
            tokens = detokenizer.output_token_ids
        shown = prompt_logprobs = None
        if processor.num_logprobs is not None:
            shown = logprobs.shown(processor, len(tokens), delta)
            if delta and shown:
                shown = shown[-len(tokens) :]
        if processor.num_prompt_logprobs is not None:
            prompt_logprobs = processor.prompt_logprobs
            if delta:
                prompt_logprobs = processor.pop_prompt_logprobs()
        score = processor.cumulative_logprob
        made = RequestOutput(
            state.external_req_id,
            state.prompt,
            state.prompt_token_ids,
            prompt_logprobs,
            [CompletionOutput(state.request_index, text, tokens, score, shown)],
            False,
            state.stats,
            state.lora_request,
            None,
            None,
            state.num_cached_tokens,
        )
        before = self._before
        if before is None:
            return made
        before.add(made, aggregate=delta)
        return before


def output_of(collector: "RequestOutputCollector") -> Any:  # noqa: ANN401
    """Return a collector's output, which is made first if it is unread; None without output."""
    output = collector.output
    if type(output) is Unread:
        output = collector.output = output.make()
    return output


def make_output(collector: "RequestOutputCollector | None") -> None:
    """Make a collector's output, if it is unread."""
    if collector is not None:
        output_of(collector)
