"""The fix request-times: no latency is computed from an event that did not happen.

The front end is the real output processor and Prometheus's logger; what other fixes end comes from
the real scheduler. The pinned ones have the fault, which is asserted as well.
"""

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from prometheus_client import REGISTRY
from support import modules
from support.logprobs import make_request
from support.scheduling import Setup, make, of_side
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tracing import SpanAttributes
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    FinishReason,
)
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import IterationStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

FIX = "request-times"
PROCESSOR = "vllm/v1/engine/output_processor.py"
LOGGERS = "vllm/v1/metrics/loggers.py"
#: Latency of a finished request to its histogram; those behind are of tokens.
HISTOGRAMS = {
    "queued_time": "vllm:request_queue_time_seconds",
    "prefill_time": "vllm:request_prefill_time_seconds",
    "inference_time": "vllm:request_inference_time_seconds",
    "decode_time": "vllm:request_decode_time_seconds",
    "mean_time_per_output_token": "vllm:request_time_per_output_token_seconds",
    "first tokens": "vllm:time_to_first_token_seconds",
    "inter-token latencies": "vllm:inter_token_latency_seconds",
}
ALWAYS = "vllm:e2e_request_latency_seconds"
SPANS = {
    "queued_time": SpanAttributes.GEN_AI_LATENCY_TIME_IN_QUEUE,
    "prefill_time": SpanAttributes.GEN_AI_LATENCY_TIME_IN_MODEL_PREFILL,
    "inference_time": SpanAttributes.GEN_AI_LATENCY_TIME_IN_MODEL_INFERENCE,
    "decode_time": SpanAttributes.GEN_AI_LATENCY_TIME_IN_MODEL_DECODE,
    "first tokens": SpanAttributes.GEN_AI_LATENCY_TIME_TO_FIRST_TOKEN,
}
#: Seconds for which the host has been up.
UPTIME = 1e6


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock takes a second."""
    ticks = itertools.count(int(UPTIME))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(ticks)))
    monkeypatch.setattr(time, "time", lambda: float(next(ticks)))


class FrontEnd:
    """The front end of one request.

    Attributes:
        finished: the stats of finished requests.
        spans: attributes of its spans.
    """

    def __init__(self, side: str, patch: pytest.MonkeyPatch) -> None:
        load = modules.of_side(side)
        module = load(PROCESSOR)
        self.processor = module.OutputProcessor(None, log_stats=True, tracing_enabled=True)
        self.logger = load(LOGGERS).PrometheusStatLogger(make(Setup()).vllm_config, [0])
        self.spans: list[dict[str, Any]] = []
        self.finished: list[Any] = []
        patch.setattr(
            module, "instrument_manual", lambda *_, **named: self.spans.append(named["attributes"])
        )

    def add(self, prompt: tuple[int, ...] = (1, 2, 3), **fields: Any) -> Any:
        """Add a request, and return it."""
        request = make_request("r", SamplingParams(detokenize=False))
        request.prompt_token_ids, request.arrival_time = list(prompt), time.time()
        for name, value in fields.items():
            setattr(request, name, value)
        self.processor.add_request(request, None)
        return request

    def take(self, *outputs: EngineCoreOutput) -> None:
        """Take the outputs of a step in."""
        stats = IterationStats()
        self.processor.process_outputs([*outputs], time.monotonic(), stats)
        self.logger.record(None, stats)
        self.finished += stats.finished_requests

    def counts(self) -> dict[str, int]:
        """The number of values of each histogram that has any."""
        labels = self._labels()
        counts = {
            name: REGISTRY.get_sample_value(f"{histogram}_count", labels)
            for name, histogram in {**HISTOGRAMS, ALWAYS: ALWAYS}.items()
        }
        assert counts.pop(ALWAYS) == len(self.finished)
        return {name: int(count) for name, count in counts.items() if count}

    def sums(self) -> dict[str, float]:
        """The sum of the values of each histogram."""
        labels = self._labels()
        return {
            name: REGISTRY.get_sample_value(f"{histogram}_sum", labels) or 0.0
            for name, histogram in HISTOGRAMS.items()
        }

    def _labels(self) -> dict[str, str]:
        values = map(str, self.logger.per_engine_labelvalues[0])
        return dict(zip(("model_name", "engine"), values, strict=True))


@pytest.fixture
def front(side: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FrontEnd]:
    """The front end of a side."""
    yield FrontEnd(side, monkeypatch)
    unregister_vllm_metrics()


def events(*names: str) -> list[EngineCoreEvent]:
    return [EngineCoreEvent.new_event(EngineCoreEventType[name]) for name in names]


def output(tokens: int = 0, *names: str, end: FinishReason | None = None) -> EngineCoreOutput:
    made = events(*names) if names else None
    return EngineCoreOutput("r", [5] * tokens, finish_reason=end, events=made)


ABORT, ERROR, LENGTH = FinishReason.ABORT, FinishReason.ERROR, FinishReason.LENGTH
BEGUN = ("QUEUED", "SCHEDULED")
_SERVED = {*HISTOGRAMS} - {"inter-token latencies"}
#: The steps of a request, given as arguments of :func:`output`, and the latencies that it has.
WAYS: dict[str, tuple[list[tuple[tuple[Any, ...], FinishReason | None]], set[str]]] = {
    "pause(abort), or a shutdown, before an output": ([((0,), ABORT)], set()),
    "refused before it was scheduled": ([((0, "QUEUED"), ERROR)], set()),
    "a failed KV load": ([((0, *BEGUN), ERROR)], {"queued_time"}),
    "preempted before its first token": ([((0, *BEGUN, "PREEMPTED"), ERROR)], {"queued_time"}),
    "one token": ([((1, *BEGUN), LENGTH)], _SERVED),
    "several tokens": ([((1, *BEGUN), None), ((2,), LENGTH)], {*HISTOGRAMS}),
    "pause(abort) behind a token": ([((1, *BEGUN), None), ((0,), ABORT)], _SERVED),
    "preempted and resumed": (
        [((1, *BEGUN), None), ((1, "PREEMPTED", "SCHEDULED"), LENGTH)],
        {*HISTOGRAMS},
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_latency_has_both_ends(side: str, front: FrontEnd, way: str) -> None:
    """In the histograms, in the span, and for other loggers."""
    steps, right = WAYS[way]
    front.add()
    for arguments, end in steps:
        front.take(output(*arguments, end=end))
    counts = front.counts()
    if side != "ours":
        stocks = {*HISTOGRAMS} if len(steps) > 1 else _SERVED
        assert {*counts} == stocks
    else:
        assert {*counts} == right
    assert {*counts.values()} <= {1}
    (finished,) = front.finished
    (span,) = front.spans
    if side == "ours":
        assert {name for name, key in SPANS.items() if key in span} == right & {*SPANS}
        for name in {*HISTOGRAMS} & {*vars(finished)}:
            assert (getattr(finished, name) == 0.0) or name in right
            assert span.get(SPANS.get(name, ""), getattr(finished, name)) == getattr(finished, name)
    assert any(abs(value) > UPTIME / 2 for value in front.sums().values()) == (
        side != "ours" and way.startswith(("pause(abort), or", "refused"))
    )


def test_a_request_without_gaps_has_stocks_values(front: FrontEnd) -> None:
    """The clock tells each of them."""
    front.add()
    front.take(output(1, *BEGUN))
    front.take(output(2))
    front.take(output(1, end=LENGTH))
    sums = front.sums()
    assert sums["queued_time"] == 1.0
    assert sums["inference_time"] == sums["prefill_time"] + sums["decode_time"]
    assert sums["inter-token latencies"] == sums["decode_time"]
    assert sums["mean_time_per_output_token"] == sums["decode_time"] / 3


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("refused", [False, True])
def test_a_session_has_the_times_of_its_last_turn(
    side: str, front: FrontEnd, refused: bool, early: bool
) -> None:
    """The engine may queue the last turn before the end of the one before is sent."""
    front.add(resumable=True)
    if early:
        front.add(resumable=True)
        front.add()
    front.take(output(1, *BEGUN))
    front.take(output(1, *("QUEUED",) * early, end=LENGTH))
    if not early:
        front.add(resumable=True)
        front.add()
    if refused:
        front.take(output(0, end=LENGTH))
    else:
        front.take(output(1, *(("SCHEDULED",) if early else BEGUN)))
        front.take(output(1, end=LENGTH))
    (finished,) = front.finished
    if side != "ours":
        assert finished.queued_time < 0 or refused
    elif refused:
        assert not {"queued_time", "prefill_time", "inference_time"} & {*front.counts()}
    else:
        assert finished.queued_time > 0
        assert finished.prefill_time < finished.e2e_latency
        assert finished.inference_time == finished.prefill_time + finished.decode_time


@pytest.mark.parametrize("kind", ["refused grammar", "prompt beyond the limit", "stalled"])
def test_what_our_fixes_end(side: str, front: FrontEnd, kind: str) -> None:
    """With the fix off, they are no worse than stock's requests: their times are seconds."""
    if side == "pinned":
        pytest.skip("it ends the engine, stalls, or is refused by the front end alone")
    blocks = 4 if kind == "stalled" else 60  # too few for its prompt
    scheduler = of_side(side, Setup(asynchronous=False, caching=False, blocks=blocks))
    if kind == "refused grammar":
        params = SamplingParams(detokenize=False)
        params.structured_outputs = StructuredOutputsParams(regex="a")
        request = front.add(sampling_params=params)
    else:
        count = 64 if kind == "prompt beyond the limit" else 20
        request = front.add(tuple(range(count)))
    made = Request.from_engine_core_request(request, None)
    if kind == "refused grammar":
        failed: Future[Any] = Future()
        failed.set_exception(ValueError("no such grammar"))
        made.structured_output_request._grammar = failed
    scheduler.add_request(made)
    for _ in range(3):
        scheduled = scheduler.schedule()
        assert not scheduled.num_scheduled_tokens
        received = scheduler.update_from_output(scheduled, ModelRunnerOutput([], {}, []))
        if 0 in received and received[0].outputs:
            front.take(*received[0].outputs)
    (finished,) = front.finished
    assert finished.finish_reason == FinishReason.ERROR
    assert bool({*front.counts()} & {*HISTOGRAMS}) == (side != "ours")
    for value in front.sums().values():
        assert 0 <= value < UPTIME / 2
