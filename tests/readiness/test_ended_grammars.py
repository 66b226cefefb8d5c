"""The fix closed-grammars: a grammar restricts the tokens between the reasoning and its own end.

The pinned classes end such requests with an error, or do not restrict them, as ours do with the
fix off. The oracle of drafts is the same request without drafts.
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from queue import Queue
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from support import batches, drafting, grammars, modules, scheduling
from support.examples import draws
from support.grammars import EOS, tokens
from support.scheduling import VOCABULARY, classes, speculative_config
from vllm.reasoning import ReasoningParser
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds
from vllm.v1.readiness import worker
from vllm.v1.readiness.frontend import grammar_pipelines
from vllm.v1.spec_decode.ngram_proposer_gpu import update_scheduler_for_invalid_drafts
from vllm.v1.structured_output.utils import apply_grammar_bitmask

CORE = "vllm/v1/engine/core.py"
MANAGER = "vllm/v1/structured_output/__init__.py"
UTILS = "vllm/v1/core/sched/utils.py"
FIX = "closed-grammars"
DRAFTS = 3
LENGTH = 10
SEVEN = {"choice": ["7"]}
SEVENS = {"regex": "7+"}


@pytest.fixture(autouse=True)
def own_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let our schedulers use our check for a request's end."""
    names = classes()[0].schedule.__globals__
    monkeypatch.setitem(names, "check_stop", modules.overlaid(UTILS).check_stop)


class Delta(BaseThinkingReasoningParser):  # type: ignore[misc]
    """Reasoning ends with a period among the newest tokens."""

    start_token, end_token = ":", "."

    def extract_reasoning(self, *arguments: Any) -> Any:
        """Unused."""

    def extract_reasoning_streaming(self, *arguments: Any) -> Any:
        """Unused."""


class Whole(Delta):
    """Reasoning ends with a period anywhere."""

    is_reasoning_end_streaming = ReasoningParser.is_reasoning_end_streaming


def make_scheduler(
    side: str,
    asynchronous: bool = False,
    drafts: int = 0,
    reasoner: Any = None,
    trimmed: bool = False,
) -> Any:
    """Make a side's scheduler, whose manager of structured outputs is the side's.

    Args:
        side: one of :data:`modules.SIDES`.
        asynchronous: whether the scheduler is.
        drafts: the most drafts of a request.
        reasoner: the class of the reasoning parser.
        trimmed: whether the worker trims drafts.
    """
    load = modules.of_side(side)
    kinds = (Scheduler, AsyncScheduler) if side == "pinned" else classes()
    scheduler = scheduling.make_scheduler(
        asynchronous, speculative_config(drafts, trimmed), 64, 4, 64, 64, kinds[asynchronous]
    )
    manager = load(MANAGER).StructuredOutputManager(scheduler.vllm_config)
    scheduler.structured_output_manager = manager
    manager.tokenizer = grammars.tokenizer()
    manager.executor = ThreadPoolExecutor(1)
    manager.reasoner_cls = reasoner
    return scheduler


def replied(
    scheduler: Any,
    grammar: dict[str, Any],
    script: list[int],
    proposals: list[list[int]] | None = None,
    asynchronous: bool = False,
    backend: str = "auto",
    **params: Any,
) -> tuple[list[int], str | None]:
    """The reply of a request whose model follows a script, and its finish reason.

    The drafter proposes the script's next tokens, or these for each number of generated tokens.
    """
    grammars.add(scheduler, "a", grammar, {"max_tokens": LENGTH, **params}, backend)

    def drafter(name: str, count: int) -> list[int]:
        del name
        if proposals is None:
            return [script[(count + n) % len(script)] for n in range(DRAFTS)]
        return proposals[count % len(proposals)]

    worker = drafting.Worker({"a": script})
    return drafting.run(scheduler, worker, drafter, asynchronous)["a"]


BACKENDS = ["xgrammar", "guidance", "outlines"]


@pytest.mark.parametrize("drafts", [0, DRAFTS])
@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_behind_the_end_are_free(side: str, backend: str, drafts: int) -> None:
    scheduler = make_scheduler(side, drafts=drafts)
    script = [*tokens("7"), EOS, *tokens("x1:")]
    reply, reason = replied(scheduler, SEVENS, script, backend=backend, ignore_eos=True)
    if side == "ours":
        assert (reply, reason) == ([*script, *script][:LENGTH], "length")
    else:
        guidance_alone = backend == "guidance" and not drafts
        assert (reason == "length") == guidance_alone


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("reasoner", [Delta, Whole])
@pytest.mark.parametrize(
    "grammar",
    [
        SEVENS,
        {"json": {"type": "array", "items": {"type": "boolean"}}},
        {"choice": ["77", "17"]},
    ],
)
def test_a_reply_begins_once_behind_drafted_reasoning(
    side: str, grammar: dict[str, Any], reasoner: Any, asynchronous: bool
) -> None:
    script = tokens("xx.7[x.7,1")
    right = replied(make_scheduler("pinned", reasoner=reasoner), grammar, script)
    scheduler = make_scheduler(side, asynchronous, DRAFTS, reasoner)
    reply = replied(scheduler, grammar, script, asynchronous=asynchronous)
    assert (reply == right) == (side == "ours")


#: Outlines takes a second to compile the grammar of an array of anything.
NUMBERS = {"json": {"type": "array", "items": {"type": "number"}}}
#: Schedulers whose requests have ended, which the drawn test uses again: one for each backend.
kept = cache(lambda _, *arguments: make_scheduler(*arguments))
PIECE = st.sampled_from([*tokens("7x.:1[]"), EOS])


@given(
    script=st.lists(PIECE, min_size=3, max_size=9),
    proposals=st.lists(st.lists(PIECE, max_size=DRAFTS), min_size=1, max_size=9),
    grammar=st.sampled_from([SEVEN, SEVENS, {"regex": "7+x?1*"}, NUMBERS]),
    backend=st.sampled_from(BACKENDS),
    reasoner=st.sampled_from([None, Delta, Whole]),
    asynchronous=st.booleans(),
    ignore_eos=st.booleans(),
    exact=st.booleans(),
)
@draws(30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_drafts_change_no_reply(
    script: list[int],
    proposals: list[list[int]],
    grammar: dict[str, Any],
    backend: str,
    reasoner: Any,
    asynchronous: bool,
    ignore_eos: bool,
    exact: bool,
) -> None:
    named: dict[str, Any] = {"backend": backend, "ignore_eos": ignore_eos}
    own = None if exact else proposals

    def given(side: str, asynchronous: bool, drafts: int) -> tuple[list[int], str | None]:
        scheduler = kept(backend, side, asynchronous, drafts, reasoner)
        return replied(scheduler, grammar, script, own, asynchronous, **named)

    right = given("ours", False, 0)
    assert right[1] in ("stop", "length")
    stock = given("pinned", False, 0)
    assert stock in (right, (stock[0], "error"))
    assert right == given("ours", asynchronous, DRAFTS)


def test_each_row_gets_its_own_mask_behind_trimmed_drafts(side: str) -> None:
    """With ``ngram_gpu`` the worker trims a step, and the scheduler does not."""
    scheduler = make_scheduler(side, True, DRAFTS, trimmed=True)
    wanted = {"a": "7", "b": "1", "c": "x"}
    for name, text in wanted.items():
        grammars.add(scheduler, name, {"regex": f"{text}+"}, {"max_tokens": LENGTH})
    names = [*wanted]
    first = scheduler.schedule()
    sampled = {name: tokens(text) for name, text in wanted.items()}
    scheduled = scheduler.schedule()
    scheduler.update_from_output(first, grammars.output_of(first, sampled))
    found = {"a": 1, "b": 0, "c": 2}
    drafts = [
        [*tokens(wanted[name] * found[name]), *[-1] * (DRAFTS - found[name])] for name in names
    ]
    scheduler.update_draft_token_ids_in_output(DraftTokenIds(names, drafts), scheduled)
    masks = scheduler.get_grammar_bitmask(scheduled)
    batch = batches.empty(modules.of_side(side), VOCABULARY, num_spec_tokens=DRAFTS)
    order = ["c", "a", "b"]
    for name in order:
        batch.add_request(batches.state(batches.Spec([1], [], {}), name))
    trimmed = replace(
        scheduled,
        num_scheduled_tokens={**scheduled.num_scheduled_tokens},
        scheduled_spec_decode_tokens={**scheduled.scheduled_spec_decode_tokens},
    )
    counts = torch.tensor([found[name] for name in order])
    update_scheduler_for_invalid_drafts(mock.Mock(), counts, trimmed, batch.req_id_to_index)
    rows = [name for name in order for _ in range(1 + found[name])]
    logits = torch.zeros(len(rows), VOCABULARY)
    if side == "pinned" or not worker.of(batch).apply_grammars(trimmed, masks, logits):
        apply_grammar_bitmask(trimmed, masks, batch, logits)
    allowed = [set(row.isfinite().nonzero().ravel().tolist()) for row in logits]
    right = [{EOS, *tokens(wanted[name])} for name in rows]
    assert (allowed == right) == (side == "ours")


class Late(Future):  # type: ignore[type-arg]
    """A result that the engine core must wait for."""

    def done(self) -> bool:
        """Return False, as if the device still computed."""
        return False


class Executor:
    """Workers of a pipeline, which sample a step's tokens as its bitmasks arrive."""

    def __init__(self, worker: drafting.Worker) -> None:
        self.worker = worker
        self.steps: deque[Any] = deque()

    def execute_model(self, scheduled: Any, non_block: bool) -> Any:
        """Begin a step."""
        assert non_block
        if scheduled.num_scheduled_tokens:
            self.steps.append(scheduled)
        future = Late()
        future.set_result(None if scheduled.num_scheduled_tokens else EMPTY_MODEL_RUNNER_OUTPUT)
        return future

    def sample_tokens(self, masks: Any, non_block: bool) -> Any:
        """End the oldest step."""
        assert non_block
        scheduled = self.steps.popleft()
        future = Late()
        sampled = self.worker.sample(scheduled, masks, {})
        future.set_result(grammars.output_of(scheduled, sampled))
        return future


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_masks_wait_for_all_tokens_in_a_pipeline(side: str, stages: int) -> None:
    scheduler = make_scheduler(side, True)
    scripts = {"a": tokens("717171"), "b": tokens("x1"), "c": tokens("1:")}
    grammars.add(scheduler, "c", None, {"max_tokens": 30})
    core = object.__new__(modules.of_side(side)(CORE).EngineCore)
    core.scheduler, core.vllm_config = scheduler, scheduler.vllm_config
    core.model_executor = Executor(drafting.Worker(scripts))
    core.batch_queue_size, core.batch_queue = stages, deque(maxlen=stages)
    core.is_ec_consumer, core.is_pooling_model = True, False
    core.async_scheduling, core.use_spec_decode = True, False
    core.aborts_queue = Queue()
    replies: dict[str, Any] = {name: ([], None) for name in scripts}
    for _ in range(stages - 1):  # without a grammar, the pipeline fills
        assert core.step_with_batch_queue() == (None, True)
    assert len(core.batch_queue) == stages - 1
    grammars.add(scheduler, "a", {"regex": "(71){2,3}x"}, {"max_tokens": LENGTH})
    grammars.add(scheduler, "b", {"regex": "(x1){3}"}, {"max_tokens": LENGTH})
    while scheduler.has_requests() or core.batch_queue:
        outputs, _ = core.step_with_batch_queue()
        grammars.receive(replies, outputs[0].outputs if outputs else ())
    assert replies.pop("c") == (tokens("1:") * 15, "length")
    right = {"a": ([*tokens("717171x"), EOS], "stop"), "b": ([*tokens("x1x1x1"), EOS], "stop")}
    assert (replies == right) == (side == "ours" or stages == 2)


@pytest.mark.parametrize(("younger", "oldest"), [(True, False), (False, True)])
def test_only_a_younger_step_with_a_grammar_is_waited_for(younger: bool, oldest: bool) -> None:
    steps = [SimpleNamespace(has_structured_output_requests=has) for has in (younger, oldest)]
    queue = deque((None, step, None) for step in steps)
    core: Any = SimpleNamespace(batch_queue=queue, async_scheduling=True)
    assert grammar_pipelines.drains(core) is younger


#: Grammars, the text that a model prefers, a stop token in it, and our reply.
STOPPED = [
    ({"regex": "[a1]{6}"}, "1a1a1a", "a", "111111"),
    ({"regex": "a{6}"}, "a", "a", "aaaaaa"),
    ({"regex": "x[1-3]{2}a{3}"}, "x1aaa", "ax", "x11aaa"),
    ({"choice": ["true", "flat"]}, "flat", "f", "true"),
]


@pytest.mark.parametrize(
    ("asynchronous", "drafts", "min_tokens"), [(False, 0, 3), (True, 0, 0), (True, DRAFTS, 0)]
)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("grammar", "script", "stops", "text"), STOPPED)
def test_a_stop_token_inside_a_grammar_does_not_cut_the_reply(
    side: str,
    grammar: dict[str, Any],
    script: str,
    stops: str,
    text: str,
    backend: str,
    asynchronous: bool,
    drafts: int,
    min_tokens: int,
) -> None:
    scheduler = make_scheduler(side, asynchronous, drafts)
    params = {"stop_token_ids": tokens(stops), "min_tokens": min_tokens}
    reply = replied(
        scheduler, grammar, tokens(script), None, asynchronous, backend=backend, **params
    )
    assert (reply == ([*tokens(text), EOS], "stop")) == (side == "ours")


def test_a_stop_token_ends_a_reply_where_its_grammar_may_end(side: str) -> None:
    scheduler = make_scheduler(side)
    reply = replied(scheduler, SEVENS, tokens("77x7"), stop_token_ids=tokens("7"))
    assert reply == ((tokens("77") if side == "ours" else tokens("7")), "stop")


def test_a_request_that_restricts_its_tokens_is_left_to_upstream(side: str) -> None:
    """The stop token may be the only one that its restriction and its grammar allow."""
    scheduler = make_scheduler(side)
    params: Any = {"stop_token_ids": tokens("a"), "allowed_token_ids": tokens("1a")}
    reply = replied(scheduler, {"regex": "[a1]{6}"}, tokens("1a1a1a"), **params)
    assert reply == (tokens("1a"), "stop")
