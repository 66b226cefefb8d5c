"""The fix sessions in the front end: each turn has its own end, and an error ends the session.

The front end is the real AsyncLLM with its output processor, over the real scheduler. The worker
samples the number of tokens that it has been given, so that a turn without its history shows.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from support import modules
from support.logprobs import make_request
from support.scheduling import Setup, of_side
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

FIX = "sessions"
PROCESSOR = "vllm/v1/engine/output_processor.py"
FRONT_END = "vllm/v1/engine/async_llm.py"
CLIENT = "vllm/v1/engine/core_client.py"
DELTA, CUMULATIVE = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE
KINDS = pytest.mark.parametrize("kind", [DELTA, CUMULATIVE])


def params_of(kind: RequestOutputKind = DELTA, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=2, detokenize=False, output_kind=kind, **fields)


def request_of(
    name: str, prompt: list[int], params: SamplingParams, resumable: bool = False
) -> EngineCoreRequest:
    request = make_request(name, params)
    request.prompt_token_ids, request.resumable = list(prompt), resumable
    return request


class Core:
    """A client of an engine core, over the real scheduler.

    Attributes:
        held: whether messages wait on their way to the engine.
        added: number of requests and turns that the engine has received.
    """

    def __init__(self, side: str) -> None:
        self.scheduler = of_side(side, Setup(asynchronous=False, caching=False, blocks=60))
        self.resources = SimpleNamespace(engine_dead=False)
        self.outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self.held = False
        self.added = 0
        self.messages: list[tuple[Callable[..., Any], Any]] = []

    async def add_request_async(self, request: Any) -> None:
        self.send(self.add, request)

    async def abort_requests_async(self, names: list[str]) -> None:
        if names:
            self.send(self.abort, names)

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self.outputs.get()

    def shutdown(self, timeout: float | None = None) -> None:
        """Nothing to shut down."""

    def send(self, act: Callable[..., Any], argument: Any) -> None:
        self.messages.append((act, argument))
        if not self.held:
            self.release()

    def release(self) -> None:
        """Deliver the messages in their order."""
        self.held = False
        while self.messages:
            act, argument = self.messages.pop(0)
            act(argument)

    def add(self, request: Any) -> None:
        self.added += 1
        grammar = (request.sampling_params.extra_args or {}).get("grammar")
        if grammar is not None:
            request.sampling_params.structured_outputs = StructuredOutputsParams(regex=grammar)
        made = Request.from_engine_core_request(request, None)
        if made.structured_output_request is not None:
            failed: Future[Any] = Future()
            failed.set_exception(ValueError("no such grammar"))
            made.structured_output_request._grammar = failed
        self.scheduler.add_request(made)

    def abort(self, names: list[str]) -> None:
        self.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)

    def end(self, reason: FinishReason) -> None:
        """End all requests, as ``pause(abort)`` does."""
        ended = self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        outputs = [EngineCoreOutput(name, [], finish_reason=reason) for name, _ in ended]
        self.outputs.put_nowait(EngineCoreOutputs(outputs=outputs))

    def step(self) -> None:
        """Run a step: a request's token is the number of tokens that it has."""
        scheduled = self.scheduler.schedule()
        names = [*scheduled.num_scheduled_tokens]
        requests = [self.scheduler.requests[name] for name in names]
        sampled = [[] if each.is_prefill_chunk else [each.num_tokens] for each in requests]
        indices = {name: row for row, name in enumerate(names)}
        output = ModelRunnerOutput(names, indices, sampled)
        for each in self.scheduler.update_from_output(scheduled, output).values():
            if each.outputs:
                self.outputs.put_nowait(each)


class Session:
    """A client of the real AsyncLLM, whose session's turns and steps the test orders."""

    def __init__(self, side: str, patch: pytest.MonkeyPatch) -> None:
        load = modules.of_side(side)
        module, processor = load(FRONT_END), load(PROCESSOR)
        patch.setattr(module, "RequestOutputCollector", processor.RequestOutputCollector)
        self.core = Core(side)
        self.engine = module.AsyncLLM.__new__(module.AsyncLLM)
        vars(self.engine).update(
            engine_core=self.core,
            output_processor=processor.OutputProcessor(None, log_stats=False),
            input_processor=SimpleNamespace(
                process_inputs=self.process,
                assign_request_id=lambda request: setattr(request, "request_id", "internal"),
            ),
            vllm_config=SimpleNamespace(
                cache_config=SimpleNamespace(kv_sharing_fast_prefill=False)
            ),
            renderer=SimpleNamespace(stat_mm_cache=lambda: None, shutdown=lambda: None),
            model_config=None,
            logger_manager=None,
            log_requests=False,
            log_stats=False,
            output_handler=None,
            _supported_tasks=("generate",),
        )
        self.aborted: list[Any] = []
        self.begun: Any = None
        self.turns: asyncio.Queue[Any] = asyncio.Queue()
        self.stream = self.engine.generate(self.inputs(), params_of(), "client")
        patch.setattr(
            module, "extract_prompt_components", lambda *_: (None, None, None), raising=False
        )

    @staticmethod
    def process(request_id: str, prompt: Any, params: Any, **fields: Any) -> Any:
        ids = prompt["prompt_token_ids"]
        if not ids:
            raise ValueError("an empty prompt")
        return request_of(request_id, ids, params, resumable=fields.get("resumable", False))

    async def inputs(self) -> AsyncGenerator[Any, None]:
        while (turn := await self.turns.get()) is not None:
            prompt, params = turn
            yield SimpleNamespace(prompt={"prompt_token_ids": prompt}, sampling_params=params)

    def say(self, *prompt: int, params: SamplingParams | None = None) -> None:
        self.turns.put_nowait((list(prompt), params))

    async def run(self, steps: int = 6) -> None:
        """Run steps, and let all tasks of the front end run behind each."""
        for _ in range(steps):
            await settle()
            self.core.step()
        await settle()

    async def read(self) -> Any:
        """Read an output, which is there; None at the end."""
        return await asyncio.wait_for(anext(self.stream, None), 60)

    def left(self) -> list[int]:
        """How many requests the front end and the scheduler have."""
        kept = self.engine.output_processor.request_states, self.core.scheduler.requests
        return [*map(len, kept)]


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def talk(side: str, patch: pytest.MonkeyPatch, act: Callable[[Session], Any]) -> Any:
    """Run a client's coroutine, and end the front end's tasks."""

    async def main() -> Any:
        session = Session(side, patch)
        begun = asyncio.ensure_future(session.read())
        await settle()
        session.begun = begun
        try:
            return await act(session)
        finally:
            begun.cancel()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    return asyncio.run(main())


def shown(output: Any) -> Any:
    (only,) = output.outputs
    return list(only.token_ids), only.finish_reason


# The collector alone.


def collector_of(side: str, kind: RequestOutputKind) -> tuple[Any, Any]:
    """An output processor with a session of three turns, and the collector of its outputs."""
    module = modules.of_side(side)(PROCESSOR)
    processor = module.OutputProcessor(None, log_stats=False)
    queue = module.RequestOutputCollector(kind, "s")
    for prompt in ([1, 2, 3], [4, 5], [6]):
        processor.add_request(
            request_of("s", prompt, params_of(kind), resumable=True), None, None, 0, queue
        )
    return processor, queue


TURNS: list[tuple[list[int], FinishReason | None]] = [
    ([7], None),
    ([8], FinishReason.LENGTH),
    ([9, 10], FinishReason.STOP),
    ([], FinishReason.LENGTH),
    ([11], None),
]


@KINDS
@pytest.mark.parametrize("reads", [*itertools.product([False, True], repeat=3)])
def test_a_late_client_gets_each_turn_with_its_end(
    side: str, kind: RequestOutputKind, reads: tuple[bool, ...]
) -> None:
    """It may read behind the first output, the first turn, or the second."""
    processor, queue = collector_of(side, kind)
    outputs: list[Any] = []
    for number, (tokens, reason) in enumerate(TURNS):
        processor.process_outputs([EngineCoreOutput("s", list(tokens), finish_reason=reason)])
        if number < 3 and reads[number]:
            outputs.append(queue.get_nowait())
    while (output := queue.get_nowait()) is not None:
        outputs.append(output)
    assert not queue.ready.is_set()
    ends = [shown(each) for each in outputs if each.outputs[0].finish_reason]
    if kind == DELTA:
        turns: list[list[int]] = [[]]
        for each in outputs:
            tokens, reason = shown(each)
            turns[-1] += tokens
            turns += [[]] if reason else []
        right = turns == [[7, 8], [9, 10], [], [11]]
    else:
        right = [tokens for tokens, _ in ends] == [[7, 8], [7, 8, 9, 10], [7, 8, 9, 10]]
        assert shown(outputs[-1])[0] == [7, 8, 9, 10, 11]
    prompts = [list(each.prompt_token_ids) for each in outputs if each.outputs[0].finish_reason]
    right &= [reason for _, reason in ends] == ["length", "stop", "length"]
    right &= prompts == [[1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]]
    assert right == (side == "ours")


# The whole front end.


def refused(session: Session) -> None:
    """Say a turn whose grammar cannot be compiled."""
    session.say(20, 21, params=params_of(extra_args={"grammar": "a"}))


ENDS: dict[str, Callable[[Session], None]] = {
    "refused grammar": refused,
    "error": lambda session: session.core.end(FinishReason.ERROR),
    "pause": lambda session: session.core.end(FinishReason.ABORT),
    "abort": lambda session: session.aborted.append(
        asyncio.ensure_future(session.engine.abort("client"))
    ),
}


@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("end", ENDS)
def test_no_turn_follows_the_end_of_a_session(
    side: str, end: str, late: bool, idle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn is said behind the end, which the client may not have read yet.

    The end comes while a turn is served, or before the next.
    """
    if side == "pinned" and end == "refused grammar":
        pytest.skip("it ends the engine")

    async def act(session: Session) -> Any:
        if end == "refused grammar":
            refused(session)
        else:
            session.say(20, 21)
        await session.run(4 if idle else 1)
        if end != "refused grammar":
            ENDS[end](session)
        await settle()
        outputs = [await session.begun]
        if not late:
            outputs += await read_all(session)
        session.say(30, 31)
        await session.run()
        outputs += await read_all(session)
        return [shown(each) for each in outputs], outputs[-1].finished, session.left()

    outputs, finished, left = talk(side, monkeypatch, act)
    assert outputs[0] == (([], "error") if end == "refused grammar" else ([2], None))
    reason = "error" if end in ("refused grammar", "error") else "abort"
    right = outputs[-1] == ([], reason) and finished and left == [0, 0]
    right &= [tokens for tokens, _ in outputs if tokens] in ([[2]], [[2], [3]], [])
    # Stock ends a session that its client aborts, if all outputs are read in time.
    assert right == (side == "ours" or (end == "abort" and not late and not idle))


@pytest.mark.parametrize("closed", [False, True])
def test_a_turn_on_its_way_to_the_engine_is_aborted(
    side: str, closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine refuses the first turn before it has received the second, or the end."""
    if side == "pinned":
        pytest.skip("it ends the engine")

    async def act(session: Session) -> Any:
        refused(session)
        await settle()
        session.core.held = True
        if closed:
            session.turns.put_nowait(None)
        else:
            session.say(30, 31)
        await settle()
        assert len(session.core.messages) == 1
        await session.run(2)
        session.core.release()
        return session.left()[1]

    assert (talk(side, monkeypatch, act) == 0) == (side == "ours")


@pytest.mark.parametrize("prompt", [None, ()])
def test_an_input_without_a_turn_generates_nothing(
    side: str, prompt: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends at once, or its first turn is refused by the front end."""

    async def act(session: Session) -> Any:
        if prompt is not None:
            session.say(*prompt)
        session.turns.put_nowait(None)
        await settle()
        await session.run(3)
        if prompt is None:
            output = await session.begun
            return session.core.added, output and shown(output), session.left()
        with pytest.raises(ValueError, match="empty"):
            await session.begun
        return session.core.added, None, session.left()

    added, output, left = talk(side, monkeypatch, act)
    assert left == [0, 0]
    stocks = 1, ([1], None) if prompt is None else None
    assert (added, output) == ((0, None) if side == "ours" else stocks)


def test_each_turn_goes_to_the_engine_of_the_first(side: str) -> None:
    """With several engines behind one client."""
    client = modules.of_side(side)(CLIENT).DPLBAsyncMPClient
    made = client.__new__(client)
    vars(made).update(
        core_engines=[b"0", b"1"],
        lb_engines=[[0, 0], [0, 0]],
        eng_start_index=0,
        client_count=1,
        reqs_in_flight={},
    )
    chosen = []
    for resumable in (True, True, False):
        request = request_of("s", [1], params_of(), resumable=resumable)
        chosen.append(made.get_core_engine_for_request(request))
    assert (chosen == [b"0"] * 3) == (side == "ours")
    other = made.get_core_engine_for_request(request_of("t", [1], params_of()))
    assert made.reqs_in_flight == {"s": chosen[-1], "t": other}
    assert other == (b"1" if side == "ours" else other)


async def read_all(session: Session) -> list[Any]:
    """Read all outputs that are there."""
    outputs: list[Any] = []
    while True:
        reading = asyncio.ensure_future(session.read())
        await settle()
        if not reading.done():
            reading.cancel()
            await settle()
            return outputs
        if (output := reading.result()) is None:
            return outputs
        outputs.append(output)
