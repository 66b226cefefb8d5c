"""Small engines, their requests, and the loop that steps them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: All engines of this process. Collecting one closes its sockets, which can block for ever.
_engines: list[Any] = []


def build_engine(model: Path, **arguments: Any) -> Any:
    """Start a small eager engine in this process, without a tokenizer.

    Args:
        model: the checkpoint's directory.
        arguments: of the engine; they replace those given here.
    """
    from vllm import EngineArgs, LLMEngine

    small = {
        "skip_tokenizer_init": True,
        "max_model_len": 256,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "disable_log_stats": True,
        "seed": 0,
    }
    engine = LLMEngine.from_engine_args(EngineArgs(model=str(model), **{**small, **arguments}))
    _engines.append(engine)
    return engine


@dataclass(frozen=True)
class Arrival:
    """A request, the step before which it arrives, and the one before which it is aborted.

    Attributes:
        name: its id.
        prompt: its token ids.
        params: fields of its SamplingParams, "bad_words" as lists of token ids. The
            temperature is 0 unless it is given.
        step: the number of steps before it arrives.
        aborted: the number of steps before it is aborted; None for never.
    """

    name: str
    prompt: list[int]
    params: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    aborted: int | None = None

    def add_to(self, engine: Any) -> None:
        """Add the request to an engine."""
        from vllm import SamplingParams, TokensPrompt

        fields = {"temperature": 0.0, "detokenize": False, **self.params}
        bad_words = fields.pop("bad_words", None)
        params = SamplingParams(**fields)
        params._bad_words_token_ids = bad_words  # a tokenizer would make them from text
        engine.add_request(self.name, TokensPrompt(prompt_token_ids=self.prompt), params)


def run_requests(engine: Any, arrivals: Sequence[Arrival]) -> tuple[dict[str, Any], int]:
    """Step an engine until all requests have ended.

    Returns:
        The output of each request that finished, by name (see :func:`as_lists`), and the
        number of steps.
    """
    last = max(max(request.step, request.aborted or 0) for request in arrivals)
    outputs: dict[str, Any] = {}
    step = 0
    while step <= last or engine.has_unfinished_requests():
        for request in arrivals:
            if request.step == step:
                request.add_to(engine)
        engine.abort_request([request.name for request in arrivals if request.aborted == step])
        for result in engine.step():
            if result.finished:
                outputs[result.request_id] = as_lists(result)
        step += 1
    return outputs, step


def as_lists(result: Any) -> dict[str, Any]:
    """Return a request's output as JSON holds it, which keeps every bit of a float."""
    completion = result.outputs[0]
    return {
        "tokens": list(completion.token_ids),
        "finish": completion.finish_reason,
        "stop": completion.stop_reason,
        "logprobs": _logprobs(completion.logprobs),
        "prompt_logprobs": _logprobs(result.prompt_logprobs),
    }


def _logprobs(positions: Any) -> Any:
    """By position, [token, logprob, rank] of each logprob."""
    if positions is None:
        return None
    return [
        logprobs and [[token, each.logprob, each.rank] for token, each in logprobs.items()]
        for logprobs in positions
    ]
