"""Fix ``request-times``: no latency of a request is computed from an event that did not happen.

A request may end before it is scheduled, or before its first token: it is refused, its KV cannot be
loaded, or ``pause(abort)`` or a shutdown ends it. 0.22.0 subtracts the time of an event that did
not happen, 0, and takes the end for a token. The histograms of queue, prefill, decode and inference
times get the host's uptime, positive or negative, and those of first tokens and of inter-token
latencies the time of the end (https://github.com/vllm-project/vllm/issues/49135). A turn of a
streaming session keeps the times of earlier turns, and its queue time is negative.

Here only tokens, and pooled outputs, count as tokens, and a latency that lacks an end is in no
histogram and in no span. Custom stat loggers read it as 0. A session has the times of its last
turn.
"""

# mirrors: vllm.v1.metrics.stats:IterationStats
# mirrors: vllm.v1.metrics.stats:RequestStateStats
# mirrors: vllm.v1.metrics.stats:FinishedRequestStats
# mirrors: vllm.v1.metrics.loggers:PrometheusStatLogger.record
# mirrors: vllm.v1.engine.output_processor:OutputProcessor.do_tracing

from typing import TYPE_CHECKING, Any

from vllm.tracing import SpanAttributes
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.output_processor import RequestState
    from vllm.v1.metrics.stats import IterationStats, LoRARequestStates, RequestStateStats


class _Unknown(float):
    """A latency that lacks an end. Its value is 0."""


_UNKNOWN = _Unknown()
#: Latency of a finished request to the times that it needs.
_LATENCIES = {
    "queued_time": ("queued_ts", "scheduled_ts"),
    "prefill_time": ("scheduled_ts", "first_token_ts"),
    "inference_time": ("scheduled_ts", "last_token_ts"),
    "decode_time": ("first_token_ts", "last_token_ts"),
    "mean_time_per_output_token": ("first_token_ts",),
}
#: Attribute of a span to the times that it needs.
_ATTRIBUTES = {
    SpanAttributes.GEN_AI_LATENCY_TIME_IN_QUEUE: _LATENCIES["queued_time"],
    SpanAttributes.GEN_AI_LATENCY_TIME_IN_MODEL_PREFILL: _LATENCIES["prefill_time"],
    SpanAttributes.GEN_AI_LATENCY_TIME_IN_MODEL_INFERENCE: _LATENCIES["inference_time"],
    SpanAttributes.GEN_AI_LATENCY_TIME_IN_MODEL_DECODE: _LATENCIES["decode_time"],
    SpanAttributes.GEN_AI_LATENCY_TIME_TO_FIRST_TOKEN: ("first_token_ts",),
}


def _lacking(times: "RequestStateStats", needs: dict[str, tuple[str, ...]]) -> list[str]:
    """Return the keys of ``needs`` that need a time that was not set."""
    if registry.REQUEST_TIMES not in switch.enabled():
        return []
    return [key for key, names in needs.items() if not all(getattr(times, n) for n in names)]


def take_end(
    stats: "IterationStats",
    output: "EngineCoreOutput",
    state: "RequestState",
    loras: "LoRARequestStates",
) -> bool:
    """Take the events of an output without tokens; False to count it as upstream."""
    if output.new_token_ids or output.pooling_output is not None:
        return False
    if registry.REQUEST_TIMES not in switch.enabled():
        return False
    if state.is_prefilling and output.prefill_stats is not None:
        stats.prompt_token_stats.update_from_output(output.prefill_stats)
    if output.events is not None:
        arguments = state.is_prefilling, state.stats, loras, state.lora_name
        stats.update_from_events(output.request_id, output.events, *arguments)
    return True


def mark_unknown(stats: "IterationStats", times: "RequestStateStats") -> None:
    """Mark the latencies of the newest finished request that lack an end."""
    for name in _lacking(times, _LATENCIES):
        setattr(stats.finished_requests[-1], name, _UNKNOWN)


def observe(histogram: Any, seconds: float) -> None:  # noqa: ANN401
    """Add a latency to a histogram, unless it lacks an end."""
    if seconds is not _UNKNOWN:
        histogram.observe(seconds)


def trim(attributes: dict[str, Any], times: "RequestStateStats") -> None:
    """Remove the latencies that lack an end from a span's attributes."""
    for name in _lacking(times, _ATTRIBUTES):
        del attributes[name]


def begin_turn(times: "RequestStateStats | None") -> None:
    """Clear the times of a session's earlier turns.

    The new turn's time of queueing may have arrived with the end of the turn before.
    """
    if times is not None and registry.REQUEST_TIMES in switch.enabled():
        times.scheduled_ts = times.first_token_ts = times.last_token_ts = 0.0
