"""The feature process-outputs: clients and /metrics get the same as from the pinned front end."""

import asyncio
import copy
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram
from support import modules
from support.examples import draws
from support.logprobs import PROCESSOR, make_request, tokenizer, tokens
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
)
from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer, FastIncrementalDetokenizer
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.stats import IterationStats, PrefillStats
from vllm.v1.outputs import LogprobsLists
from vllm.v1.readiness.engine import gauges, switch
from vllm.v1.readiness.frontend import continuing, histograms

WORD = FIX = "process-outputs"
FRONT_END = "vllm/v1/engine/async_llm.py"
DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


class Wish(NamedTuple):
    """Options of a request."""

    kind: RequestOutputKind = DELTA
    logprobs: int | None = None
    flat: bool = False
    detokenize: bool = True
    stop: tuple[str, ...] = ()
    special: bool = True
    spaces: bool = True
    n: int = 1
    session: bool = False

    def params(self) -> SamplingParams:
        return SamplingParams(
            output_kind=self.kind,
            logprobs=self.logprobs,
            flat_logprobs=self.flat,
            detokenize=self.detokenize,
            stop=list(self.stop) if self.detokenize else None,
            skip_special_tokens=self.special,
            spaces_between_special_tokens=self.spaces,
            n=self.n,
            temperature=0.5,
        )


class Step(NamedTuple):
    """A message: one output for each request that has not ended, then readers.

    Attributes:
        counts: numbers of tokens; None for a request without an output.
        ends: rows that end.
        kinds: rows whose output has a further field, and which.
        reads: rows whose clients take their output.
        aborts: rows that are aborted behind it.
    """

    counts: list[int | None]
    ends: set[int]
    kinds: dict[int, str]
    reads: set[int]
    aborts: set[int]
    seed: int


class Side:
    """An output processor with clients."""

    def __init__(
        self, side: str, wishes: list[Wish], interval: int = 1, stats: bool = True, text: Any = None
    ) -> None:
        self.module = modules.of_side(side)(PROCESSOR)
        self.processor = self.module.OutputProcessor(
            text or tokenizer(), log_stats=stats, stream_interval=interval
        )
        self.stats = stats
        self.queues: list[Any] = []
        #: The internal ids of each row.
        self.names: list[list[str]] = []
        self.taken: list[Any] = []
        self.measured: list[str] = []
        for row, wish in enumerate(wishes):
            queue = self.module.RequestOutputCollector(wish.kind, str(row))
            self.queues.append(queue)
            request = make_request(str(row), wish.params())
            request.resumable = wish.session
            if wish.n == 1:
                self.processor.add_request(request, "prompt", queue=queue)
                self.names.append([str(row)])
                continue
            parent, names = ParentRequest(request), []
            for index in range(wish.n):
                child = copy.copy(request)
                child.request_id, child.sampling_params = parent.get_child_info(index)
                self.processor.add_request(child, "prompt", parent, index, queue)
                names.append(child.request_id)
            self.names.append(names)

    def step(self, number: int, step: Step) -> None:
        random = np.random.default_rng(step.seed)
        outputs = []
        for row, names in enumerate(self.names):
            count = step.counts[row % len(step.counts)]
            for name in names:
                values = self._output(name, row, count, step, random)
                if name in self.processor.request_states and values is not None:
                    outputs.append(values)
        self.process(float(number), outputs)
        for row in sorted(step.aborts & {*range(len(self.names))}):
            self.processor.abort_requests([str(row)], internal=False)
        for row in sorted(step.reads & {*range(len(self.names))}):
            self.read(row)

    def process(self, now: float, outputs: list[EngineCoreOutput]) -> None:
        stats = IterationStats() if self.stats else None
        if stats is not None:
            stats.iteration_timestamp = 0.0
        made = self.processor.process_outputs(outputs, now, stats)
        assert made.request_outputs == []
        self.measured.append(repr((made.reqs_to_abort, stats)))

    def read(self, row: int) -> None:
        queue = self.queues[row]
        assert queue.ready.is_set() == (queue.output is not None)
        try:
            self.taken.append((row, queue.get_nowait()))
        except ValueError as error:
            self.taken.append((row, error))

    @staticmethod
    def _output(
        name: str, row: int, count: int | None, step: Step, random: np.random.Generator
    ) -> EngineCoreOutput | None:
        ids = random.choice(tokens(), (count or 0, 4)).astype(np.int32)
        lists = LogprobsLists(
            ids, -random.random(ids.shape).astype(np.float32), random.integers(1, 9, len(ids))
        )
        if count is None or (not count and row not in step.ends):
            return None
        kind = step.kinds.get(row)
        output = EngineCoreOutput(
            name,
            ids[:, 0].tolist(),
            new_logprobs=lists if row % 2 else None,
            finish_reason=FinishReason.LENGTH if row in step.ends else None,
        )
        if kind == "events":
            output.events = [EngineCoreEvent(EngineCoreEventType.PREEMPTED, 1.0)]
        if kind == "prefill":
            output.prefill_stats = PrefillStats(3, 2, 1, 1, 0)
        if kind == "kv":
            output.kv_transfer_params = {"key": row}
        if kind == "experts":
            output.routed_experts = np.full((max(1, len(ids)), 1, 1), row)
        if kind == "stopped" and output.finish_reason:
            output.finish_reason, output.stop_reason = FinishReason.STOP, 7
        return output


# Rows with an odd number have logprobs.
plain = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(RequestOutputKind),
        "detokenize": st.sampled_from([True, True, False]),
        "stop": st.sampled_from([(), (), ("é",), ("a€", "😀")]),
        "special": st.booleans(),
        "spaces": st.booleans(),
        "n": st.sampled_from([1, 1, 1, 2]),
    }
)
scored = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(RequestOutputKind),
        "logprobs": st.sampled_from([0, 2, 3]),
        "flat": st.booleans(),
        "detokenize": st.booleans(),
        "n": st.sampled_from([1, 1, 2]),
    }
)
wishes = st.lists(st.tuples(plain, scored), min_size=1, max_size=2).map(
    lambda pairs: [Wish(**fields) for pair in pairs for fields in pair]
)
rows = st.sets(st.integers(0, 3), max_size=4)
steps = st.lists(
    st.builds(
        Step,
        counts=st.lists(st.sampled_from([None, 0, 1, 1, 1, 1, 2, 3]), min_size=4, max_size=4)
        | st.just([1, 1, 1, 1]),
        ends=st.sampled_from([set(), set(), set(), {0}, {1}, {0, 1, 2, 3}]),
        kinds=st.dictionaries(
            st.integers(0, 3),
            st.sampled_from(["events", "prefill", "kv", "experts", "stopped"]),
            max_size=1,
        ),
        reads=rows | st.just({0, 1, 2, 3}),
        aborts=st.sampled_from([set(), set(), set(), set(), {0}, {1, 2}]),
        seed=st.integers(0, 1 << 16),
    ),
    min_size=1,
    max_size=9,
)


def shown(side: Side) -> tuple[str, ...]:
    """All outputs so far, of which some grow with later ones, and all statistics."""
    states = {
        name: {key: value for key, value in vars(state).items() if "readiness" not in key}
        for name, state in side.processor.request_states.items()
    }
    texts = [
        (
            name,
            state["detokenizer"].output_token_ids,
            getattr(state["detokenizer"], "output_text", ""),
        )
        for name, state in states.items()
    ]
    stats = [repr(state["stats"]) for state in states.values()]
    return repr(side.taken), repr(side.measured), repr(texts), repr(stats)


@draws(150, deadline=None)
@given(wishes, steps, st.sampled_from([1, 1, 1, 2, 3]), st.booleans())
def test_clients_are_given_the_same(
    wished: list[Wish], taken: list[Step], interval: int, stats: bool
) -> None:
    if interval > 1:  # upstream merges no children of one step then
        wished = [wish._replace(n=1) for wish in wished]
    sides = [Side(side, wished, interval, stats) for side in ("pinned", "ours")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(switch.NAME, "-fixes")
        for number, step in enumerate(taken):
            for side in sides:
                side.step(number, step)
            assert shown(sides[1]) == shown(sides[0])
        for row in range(len(wished)):
            for side in sides:
                side.read(row)
    assert shown(sides[1]) == shown(sides[0])


PLAIN = Step([1], set(), {}, set(), set(), 1)


@pytest.mark.parametrize(
    ("wish", "served"),
    [
        (Wish(), True),
        (Wish(FINAL), True),
        (Wish(RequestOutputKind.CUMULATIVE), True),
        (Wish(FINAL, n=2), True),
        (Wish(detokenize=False), True),
        (Wish(n=2), False),
        (Wish(stop=("x",)), False),
        (Wish(session=True), False),
    ],
)
def test_requests_that_continue_are_served(wish: Wish, served: bool) -> None:
    side = Side("ours", [wish])
    for number in range(3):
        side.step(number, PLAIN)
    states = side.processor.request_states.values()
    served_states = [isinstance(state.readiness, continuing.Continuation) for state in states]
    assert {*served_states} == {served}


@pytest.mark.parametrize("word", ["", f"-{WORD}", "off"])
def test_no_output_is_made_until_it_is_taken(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(switch.NAME, word or "on")
    side = Side("ours", [Wish()])
    for number in range(5):
        side.step(number, PLAIN)
    made = isinstance(side.queues[0].output, RequestOutput)
    assert made == bool(word)
    side.read(0)
    (output,) = side.taken[0][1].outputs
    assert len(output.token_ids) == 5


def test_text_grows_in_place() -> None:
    """A token's cost does not grow with the text: the string has no second reference."""
    side = Side("ours", [Wish()])
    detokenizer = side.processor.request_states["0"].detokenizer
    for number in range(3):
        side.process(number, [EngineCoreOutput("0", [tokens()[0]])])
    detokenizer.output_text = "x" * (1 << 20)
    moved = 0
    for number in range(64):
        before = id(detokenizer.output_text)
        side.process(number, [EngineCoreOutput("0", [tokens()[0]])])
        moved += id(detokenizer.output_text) != before
    assert len(detokenizer.output_text) == (1 << 20) + 64
    assert moved < 32


# Other people's code.


def state_of(side: Side) -> Any:
    """The state of a side's first request."""
    return side.processor.request_states["0"]


#: By case, the owner of a function of a side that is replaced, and the function's name.
REPLACED: dict[str, tuple[Callable[[Side], Any], str]] = {
    "stats": (lambda side: side.module.OutputProcessor, "_update_stats_from_output"),
    "output": (lambda side: side.module.RequestState, "make_request_output"),
    "request output": (lambda side: side.module.RequestState, "_new_request_output"),
    "completion": (lambda side: side.module.RequestState, "_new_completion_output"),
    "put": (lambda side: side.module.RequestOutputCollector, "put"),
    "update": (lambda _: BaseIncrementalDetokenizer, "update"),
    "decode_next": (lambda _: FastIncrementalDetokenizer, "decode_next"),
    "iteration": (lambda _: IterationStats, "update_from_output"),
    "state's own": (state_of, "make_request_output"),
    "detokenizer's own": (lambda side: state_of(side).detokenizer, "update"),
    "collector's own": (lambda side: state_of(side).queue, "put"),
    "processor's own": (lambda side: state_of(side).logprobs_processor, "update_from_output"),
}


def replace(side: Side, name: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace a function of a side by one that counts its calls."""
    owner, function = REPLACED[name][0](side), REPLACED[name][1]
    original = getattr(owner, function)
    counted = []

    def counting(*args: Any, **named: Any) -> Any:
        counted.append(1)
        return original(*args, **named)

    monkeypatch.setattr(owner, function, counting)
    return counted


@pytest.mark.parametrize("name", REPLACED)
@pytest.mark.parametrize("before", [0, 3])
def test_a_replaced_function_is_called_for_each_token(
    name: str, before: int, monkeypatch: pytest.MonkeyPatch, fallbacks: dict[tuple[str, str], int]
) -> None:
    """It may be replaced before the first token, or later while an output is unread."""
    side = Side("ours", [Wish()])
    for number in range(before):
        side.step(number, PLAIN)
    counted = replace(side, name, monkeypatch)
    for number in range(before, before + 4):
        side.step(number, PLAIN)
    assert len(counted) == 4
    assert "own" in name or fallbacks == {(WORD, gauges.REPLACED): 1}
    side.read(0)
    assert len(side.taken[0][1].outputs[0].token_ids) == before + 4
    monkeypatch.undo()
    for number in range(9, 12):
        side.step(number, PLAIN)
    assert len(counted) == 4


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("calls", [True, False], ids=["calls the original", "merges by itself"])
def test_an_unread_output_survives_a_replacement(
    calls: bool, before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(switch.NAME, "-fixes")
    sides = [Side(side, [Wish(), Wish(logprobs=2)]) for side in ("pinned", "ours")]
    for side in sides:
        for number in range(before):
            side.step(number, PLAIN)
        with monkeypatch.context() as patch:
            if calls:
                replace(side, "put", patch)
            else:
                merging = modules.pristine(PROCESSOR).RequestOutputCollector.put
                patch.setattr(side.module.RequestOutputCollector, "put", merging)
            side.step(4, PLAIN._replace(ends={1}))
        side.step(5, PLAIN._replace(reads={0, 1}))
    assert shown(sides[1]) == shown(sides[0])


def test_a_subclass_is_upstreams(fallbacks: dict[tuple[str, str], int]) -> None:
    module = modules.overlaid(PROCESSOR)
    derived = type("Derived", (module.OutputProcessor,), {})
    side = Side("ours", [])
    side.processor = derived(tokenizer(), log_stats=True)
    queue = module.RequestOutputCollector(DELTA, "0")
    side.processor.add_request(make_request("0", Wish().params()), "prompt", queue=queue)
    for number in range(3):
        side.process(number, [EngineCoreOutput("0", [tokens()[0]])])
    assert isinstance(queue.output, RequestOutput)
    assert fallbacks == {(WORD, gauges.OTHER_CLASS): 1}


def test_an_error_replaces_an_unread_output() -> None:
    sides = [Side(side, [Wish()]) for side in ("pinned", "ours")]
    for side in sides:
        for number in range(3):
            side.step(number, PLAIN)
        side.processor.propagate_error(ValueError("dead"))
        side.step(4, PLAIN)  # as from a message behind it
        side.read(0)
        side.read(0)
    assert shown(sides[1]) == shown(sides[0])


@pytest.mark.parametrize("special", [True, False])
def test_special_tokens_have_the_same_text(special: bool) -> None:
    made = Tokenizer(BPE({"a": 0, "b": 1}, []))
    made.add_special_tokens(["<x>", "<y>"])
    made.decoder = decoders.ByteLevel()
    text = PreTrainedTokenizerFast(tokenizer_object=made)
    wish = Wish(special=special, spaces=False)
    sides = [Side(side, [wish], text=text) for side in ("pinned", "ours")]
    for side in sides:
        for number, token in enumerate([0, 2, 3, 3, 1, 2, 0, 99]):
            side.process(number, [EngineCoreOutput("0", [token])])
        side.read(0)
    assert shown(sides[1]) == shown(sides[0])


# /metrics.


@draws(100)
@given(
    st.lists(st.floats(allow_nan=True) | st.sampled_from([0.0, 0.1, 0.5, 1e-9, 0.25]), max_size=30)
)
def test_a_histogram_has_equal_values(values: list[float]) -> None:
    samples = []
    for all_at_once in (False, True):
        registry = CollectorRegistry()
        histogram = Histogram(
            "h", "h", ["l"], buckets=(0.1, 0.25, 0.5, 1.0), registry=registry
        ).labels("x")
        histogram.observe(0.3)
        if all_at_once:
            histograms.observe_all(histogram, values)
        else:
            for value in values:
                histogram.observe(value)
        samples.append(
            [
                (sample.name, sample.labels, repr(sample.value))
                for metric in registry.collect()
                for sample in metric.samples
                if not sample.name.endswith("_created")
            ]
        )
    assert samples[1] == samples[0]


def test_a_histogram_of_another_library_gets_each_value() -> None:
    seen: list[float] = []
    histograms.observe_all(SimpleNamespace(observe=seen.append), [1.0, 2.0])
    assert seen == [1.0, 2.0]


def test_a_replaced_observe_gets_each_value(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    monkeypatch.setattr(Histogram, "observe", lambda _, value: seen.append(value))
    histograms.observe_all(Histogram("h", "h", registry=None), [1.0, 2.0])
    assert seen == [1.0, 2.0]


# Fairness.


class Core:
    """An engine core's client whose messages have all arrived."""

    def __init__(self, messages: list[EngineCoreOutputs]) -> None:
        self.messages: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        for message in messages:
            self.messages.put_nowait(message)

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self.messages.get()

    async def abort_requests_async(self, names: list[str]) -> None:
        pass

    def shutdown(self, timeout: float | None = None) -> None:
        pass


def handle(side: str, messages: list[EngineCoreOutputs], queues: Callable[[Any], None]) -> None:
    """Let a real output handler read messages; ``queues`` adds the requests."""

    async def main() -> None:
        load = modules.of_side(side)
        processor = load(PROCESSOR).OutputProcessor(None, log_stats=False)
        engine = load(FRONT_END).AsyncLLM.__new__(load(FRONT_END).AsyncLLM)
        vars(engine).update(
            engine_core=Core(messages),
            output_processor=processor,
            renderer=SimpleNamespace(stat_mm_cache=lambda: None, shutdown=lambda: None),
            logger_manager=None,
            log_stats=False,
            output_handler=None,
        )
        queues(processor)
        engine._run_output_handler()
        for _ in range(200):
            await asyncio.sleep(0)
        engine.output_handler.cancel()

    asyncio.run(main())


def message(*names: str) -> EngineCoreOutputs:
    return EngineCoreOutputs(outputs=[EngineCoreOutput(name, [5]) for name in names], timestamp=1.0)


def add(side: str, processor: Any, name: str) -> Any:
    """Add a request to a processor of a side; return its client's queue."""
    queue = modules.of_side(side)(PROCESSOR).RequestOutputCollector(DELTA, name)
    params = SamplingParams(output_kind=DELTA, detokenize=False)
    processor.add_request(make_request(name, params), None, queue=queue)
    return queue


def test_a_first_token_is_handed_out_before_the_others(side: str) -> None:
    """Eight requests have a backlog of messages, in the last of which another one begins."""
    names = [*map(str, range(8))]
    order: list[str] = []

    def begin(processor: Any) -> None:
        async def read(name: str, queue: Any) -> None:
            while True:
                output = await queue.get()
                order.append(f"{name}: {len(output.outputs[0].token_ids)}")

        for name in [*names, "new"]:
            tasks.append(asyncio.ensure_future(read(name, add(side, processor, name))))
        processor.process_outputs([EngineCoreOutput(name, [5]) for name in names])

    tasks: list[Any] = []
    handle(side, [message(*names), message(*names), message(*names, "new")], begin)
    assert order[: len(names)] == [f"{name}: 1" for name in names]
    assert (order[len(names)] == "new: 1") == (side == "ours")
    assert sum(int(each.split()[1]) for each in order) == 4 * len(names) + 1


def test_other_tasks_run_though_messages_do_not_end(side: str) -> None:
    """Whenever a message is read, another one has arrived."""
    names = [*map(str, range(100))]
    ticks: list[int] = []

    def begin(processor: Any) -> None:
        for name in names:
            add(side, processor, name)
        asyncio.get_running_loop().call_soon(tick, processor)

    def tick(processor: Any) -> None:
        ticks.append(len(processor.request_states["0"].detokenizer.token_ids))
        asyncio.get_running_loop().call_soon(tick, processor)

    handle(side, [message(*names) for _ in range(100)], begin)
    longest = max(later - earlier for earlier, later in itertools.pairwise(ticks))
    assert longest == (100 if side != "ours" else 21)
