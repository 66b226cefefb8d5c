"""Drawn lockstep runs: ours beside upstream's, compared after every step.

See :mod:`support.lockstep`. Ours runs three times: copies arrive at any time, at once, and late.
"""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, reject, seed, settings
from hypothesis import strategies as st
from support.examples import draws
from support.lockstep import DRAFTED, OWN, VOCABULARY, LockstepRun, SetAside
from support.processors import SPIES
from vllm.v1.readiness.engine import fences
from vllm.v1.readiness.inputs import step_inputs

TOKENS = st.integers(0, VOCABULARY - 1)
#: Upstream's holder of thinking budgets, without our fixes.
THINKING_OFF = "-thinking-rows,-thinking-sections,-thinking-unlimited"
#: Tokens of bad words and markers, which the logits favour.
FREQUENT = range(DRAFTED)
MARKERS = st.lists(st.sampled_from(FREQUENT), min_size=1, max_size=2)
PENALTIES = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([0.7, 1.0000001, 1.3, 1.9]),
        "frequency_penalty": st.sampled_from([-1.1, -0.3, 0.3, 2.0]),
        "presence_penalty": st.sampled_from([-0.9, 1e-7, 0.1, 1.5]),
    },
)
#: Bad words that only upstream can read: ids that are no tokens, and, last, an empty word.
ODD: list[list[int]] = [[-1], [-2, 1], [1, -1, 0], [-3], [2**31], [0, 2**31], []]
#: Methods of :class:`DrawnRun`, of which one may be called between two steps.
EVENTS = ("abort", "preempt", "drop", "resend", "continue_session", "fail", "cut")


def one_in(draw: Any, n: int) -> bool:
    """Draw True once in ``n``; Hypothesis makes it rarer as it shrinks."""
    return bool(draw(st.integers(0, n - 1)) == n - 1)


@st.composite
def requests(draw: Any, drafts: int, thinking: bool) -> dict[str, Any]:
    """Draw the arguments of :meth:`LockstepRun.add`."""
    params: dict[str, Any] = dict(draw(PENALTIES))
    if thinking and draw(st.integers(0, 3)) > 0:
        params["thinking_token_budget"] = draw(st.sampled_from([0, 1, 2, 3, 5, 8, 40]))
    if (params and draw(st.booleans())) or one_in(draw, 40):
        params |= {"min_tokens": draw(st.integers(1, 8)), "stop_token_ids": [0, 1, 2]}
    if draw(st.integers(0, 1)) == 0:
        tokens = st.one_of(*[st.sampled_from(FREQUENT)] * 4, TOKENS)
        words = draw(st.lists(st.lists(tokens, min_size=1, max_size=4), min_size=1, max_size=6))
        if one_in(draw, 5):
            words.append(draw(st.sampled_from(ODD[:-1] * 9 + ODD[-1:])))
        params["bad_words"] = words
        params["logit_bias"] = dict.fromkeys(FREQUENT, 6.0)
    if one_in(draw, 4):
        params["temperature"] = 0.8
        params |= draw(st.sampled_from([{}, {"top_k": 3}, {"top_p": 0.7}]))
    if one_in(draw, 6):
        params["logprobs"] = draw(st.integers(0, 3))
    if one_in(draw, 40):
        params["allowed_token_ids"] = draw(st.lists(TOKENS, min_size=1, max_size=5))
    last = st.lists(st.sampled_from(FREQUENT), min_size=1, max_size=3)
    return params | {
        "prompt": draw(st.lists(TOKENS, max_size=27)) + draw(last),
        "max_tokens": draw(st.integers(params.get("min_tokens", 1), 18)),
    }


class DrawnRun:
    """A lockstep run of requests and events that Hypothesis draws.

    Attributes:
        synced: whether copies of upstream's runner arrive as late as ours.
        simple: whether no request and event so far needs a fence of ours.
    """

    def __init__(self, draw: Any, asynchronous: bool, drafts: int) -> None:
        self.draw = draw
        markers = draw(st.none() | st.tuples(MARKERS, MARKERS))
        self.thinking = markers is not None
        chance = random.Random(draw(st.integers(0, 1000)))
        often = draw(st.sampled_from([0.0, 0.2, 0.5, 0.8]))
        processors = [None] if drafts else [None, None, *SPIES]
        self.lockstep = LockstepRun(
            draw(st.integers(0, 1000)),
            asynchronous,
            drafts,
            max_num_seqs=draw(st.integers(1, 6)),
            num_blocks=draw(st.sampled_from([18, 26, 80])),
            max_model_len=draw(st.sampled_from([40, 96])),
            reorder_threshold=draw(st.sampled_from([None, 1 + drafts])),
            processor=draw(st.sampled_from(processors)),
            trimmed=asynchronous and drafts > 0 and draw(st.booleans()),
            markers=markers,
            ahead=0 if drafts else draw(st.sampled_from([0, 0, 1, 2])),
            own=draw(st.sampled_from([None, None, None, None, *OWN])),
            switch=draw(
                st.sampled_from(["", "", "-plugin-processors", "-allowed-tokens", THINKING_OFF])
            ),
            arrives=lambda: chance.random() < often,
            twins=asynchronous,
        )
        self.synced = often == 0.0
        self.req_ids: list[str] = []
        self.sessions: list[str] = []
        self.simple = self.lockstep.own is None and self.lockstep.processor is None

    def run(self) -> None:
        """Draw requests and events, and run all requests to their ends.

        Raises:
            SetAside: the run cannot be compared to its end.
        """
        draw, lockstep = self.draw, self.lockstep
        for _ in range(draw(st.integers(5, 25))):
            for _ in range(draw(st.sampled_from([0, 0, 1, 3]))):
                self.req_ids.append(self.add())
                if one_in(draw, 6):
                    lockstep.structured.add(self.req_ids[-1])
            if one_in(draw, 3):
                getattr(self, draw(st.sampled_from(EVENTS)))()
            lockstep.step(read_first=one_in(draw, 4))
        for session in self.sessions:
            lockstep.close(session)
        lockstep.finish()

    def add(self, req_id: str | None = None, **named: Any) -> str:
        """Add a request, and return its id."""
        lockstep = self.lockstep
        params = self.draw(requests(lockstep.drafts, self.thinking)) | named
        self.simple &= not any(odd in params.get("bad_words", ()) for odd in ODD)
        penalised = any(name.endswith("_penalty") for name in params)
        if "allowed_token_ids" in params and lockstep.switch != "-allowed-tokens":
            lockstep.excuse = "allowed_token_ids reach others on stock"
        if "min_tokens" in params and not penalised and lockstep.asynchronous:
            lockstep.excuse = "stock forgets an output's length, and min_tokens last too long"
        return lockstep.add(req_id=req_id, **params)

    def draw_request(self) -> str | None:
        """Draw one of the requests so far, whether it has ended or not."""
        return self.draw(st.sampled_from(self.req_ids)) if self.req_ids else None

    def abort(self) -> None:
        """Abort a request."""
        if req_id := self.draw_request():
            self.lockstep.abort(req_id)
            self.req_ids.remove(req_id)

    def preempt(self) -> None:
        """Preempt all requests."""
        # With drafts in flight upstream's scheduler loses count of the tokens to discard.
        if not (self.lockstep.asynchronous and self.lockstep.drafts):
            self.lockstep.preempt_all()

    def drop(self) -> None:
        """Schedule the next step without drafts."""
        self.lockstep.drop_drafts()

    def resend(self) -> None:
        """Add a request under the id of an earlier one."""
        req_id = self.draw_request()
        if req_id is not None and req_id not in self.sessions:
            # Upstream's scheduler gives the old one's tokens in flight to the new one.
            if not one_in(self.draw, 12):
                self.lockstep.read()
            self.lockstep.abort(req_id)
            self.lockstep.strays.add(req_id)
            self.add(req_id)

    def continue_session(self) -> None:
        """Begin a session, or queue its next input, with which its output becomes a prompt."""
        session = self.draw(st.sampled_from([None, *self.sessions]))
        if session is None or session not in self.lockstep.scheduler.requests:
            session = f"s{len(self.sessions)}"
            self.sessions.append(session)
            self.lockstep.strays.add(session)
        self.add(session, resumable=True)

    def fail(self) -> None:
        """Fail to load a block of a request."""
        req_id = self.draw_request()
        if req_id is not None and req_id in self.lockstep.scheduler.requests:
            self.simple = False
            self.lockstep.strays.add(req_id)
            self.lockstep.fail_loads(req_id)

    def cut(self) -> None:
        """Have the scheduler keep less of an output than the runner has."""
        if req_id := self.draw_request():
            self.simple = False
            self.lockstep.cuts[req_id] = self.draw(st.integers(1, 4))


def run_drawn(draw: Any, asynchronous: bool, drafts: int) -> None:
    """Draw a lockstep run; where nothing needs a fence, require that there was none.

    Raises:
        SetAside: the run cannot be compared to its end.
    """
    before = fences.counts().get("bad-words", 0)
    with mock.patch.object(step_inputs, "ENOUGH", draw(st.sampled_from([1, 1, 1, 3]))):
        drawn = DrawnRun(draw, asynchronous, drafts)
        drawn.run()
    if drawn.simple:
        assert not drawn.synced or drawn.lockstep.ours.waits <= drawn.lockstep.stock.waits
        assert fences.counts().get("bad-words", 0) == before


def tally(number: int, count: int, asynchronous: bool, drafts: int) -> Counter[str]:
    """Draw runs from a seed until ``count`` are equal; the reasons why others were set aside.

    Args:
        number: the seed.
        count: number of equal runs, which the result counts under "equal".
        asynchronous: as for :class:`LockstepRun`.
        drafts: as for :class:`LockstepRun`.
    """
    outcomes: Counter[str] = Counter()

    @seed(number)
    @settings(max_examples=count, database=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def draw_run(data: st.DataObject) -> None:
        try:
            run_drawn(data.draw, asynchronous, drafts)
        except SetAside as aside:
            outcomes[str(aside)] += 1
            reject()
        outcomes["equal"] += 1

    draw_run()
    return outcomes


def fixed_runs(asynchronous: bool, drafts: int) -> Callable[..., None]:
    """Return the slow test of runs that are the same each time.

    Each kind of runs has a file, so that a worker of its own may run it.
    """

    @pytest.mark.slow
    @pytest.mark.parametrize("number", range(3))
    def test(number: int, record_property: Callable[[str, object], None]) -> None:
        outcomes = tally(number, 30, asynchronous, drafts)
        record_property("lockstep runs", dict(outcomes))
        assert outcomes["equal"] == 30

    return test


@given(data=st.data())
@draws(12)
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("drafts", [0, 2])
def test_drawn_runs_equal_upstream(asynchronous: bool, drafts: int, data: st.DataObject) -> None:
    """Requests come, go, are preempted and moved, in any order, at any time."""
    try:
        run_drawn(data.draw, asynchronous, drafts)
    except SetAside:
        reject()
