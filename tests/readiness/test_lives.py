"""Whole lives of a batch: ours beside upstream's, step by step.

After every step :class:`support.lives.Life` compares, with equality, the logits that all halves
sample from, the tokens, the logprobs, what logits processors are given, and what is always true
of our history. Ours lives three times: copies arrive at any time, at once, and late.
"""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, reject, seed, settings
from hypothesis import strategies as st
from support.lives import DRAFTED, OWN, VOCABULARY, Life, SetAside
from vllm.v1.readiness import fences

TOKENS = st.integers(0, VOCABULARY - 1)
#: What bad words and markers are made of, and what is likely where there are some.
FREQUENT = range(DRAFTED)
MARKED = st.sampled_from(FREQUENT)
MARKERS = st.lists(MARKED, min_size=1, max_size=2)
PENALTIES = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([0.7, 1.0000001, 1.3, 1.9]),
        "frequency_penalty": st.sampled_from([-1.1, -0.3, 0.3, 2.0]),
        "presence_penalty": st.sampled_from([-0.9, 1e-7, 0.1, 1.5]),
    },
)
#: Words that only upstream can read: ids that are no tokens, and, last, no word at all.
ODD: list[list[int]] = [[-1], [-2, 1], [1, -1, 0], [-3], [2**31], [0, 2**31], []]
#: What befalls a batch between two steps.
EVENTS = ("abort", "preempt", "drop", "again", "talk", "fail", "cut")


def one_in(draw: Any, n: int) -> bool:
    """Whether a chance of one in ``n`` is taken; Hypothesis makes that rarer as it shrinks."""
    return bool(draw(st.integers(0, n - 1)) == n - 1)


@st.composite
def requests(draw: Any, drafts: int, thinking: bool) -> dict[str, Any]:
    """The keywords of :meth:`Life.add`."""
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
    if not drafts and one_in(draw, 4):
        params["temperature"] = 0.8
        params |= draw(st.sampled_from([{}, {"top_k": 3}, {"top_p": 0.7}]))
    if one_in(draw, 6):
        params["logprobs"] = draw(st.integers(0, 3))
    if one_in(draw, 40):
        params["allowed_token_ids"] = draw(st.lists(TOKENS, min_size=1, max_size=5))
    return params | {
        "prompt": draw(st.lists(TOKENS, max_size=27))
        + draw(st.lists(MARKED, min_size=1, max_size=3)),
        "max_tokens": draw(st.integers(params.get("min_tokens", 1), 18)),
    }


class Course:
    """What befalls a life, as Hypothesis draws it."""

    def __init__(self, draw: Any, asynchronous: bool, drafts: int) -> None:
        self.draw = draw
        markers = draw(st.none() | st.tuples(MARKERS, MARKERS))
        self.thinking = markers is not None
        chance = random.Random(draw(st.integers(0, 1000)))
        often = draw(st.sampled_from([0.0, 0.2, 0.5, 0.8]))
        processors = [None] if drafts else [None, None, "user", "plugin"]
        self.life = Life(
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
            switch=draw(st.sampled_from(["", "", "-plugin-processors", "-allowed-tokens"])),
            arrives=lambda: chance.random() < often,
            twins=asynchronous,
        )
        #: Whether copies of upstream's half arrive as ours do.
        self.even = often == 0.0
        self.live: list[str] = []
        self.sessions: list[str] = []
        #: Whether there was nothing to wait for: nothing that only upstream serves, and no cut.
        self.plain = self.life.own is None and self.life.processor is None

    def run(self) -> None:
        """Live it."""
        draw, life = self.draw, self.life
        for _ in range(draw(st.integers(5, 25))):
            for _ in range(draw(st.sampled_from([0, 0, 1, 3]))):
                self.live.append(self.add())
                if one_in(draw, 6):
                    life.structured.add(self.live[-1])
            if one_in(draw, 3):
                getattr(self, draw(st.sampled_from(EVENTS)))()
            life.step(read_first=one_in(draw, 4))
        for session in self.sessions:
            life.close(session)
        life.finish()

    def add(self, req_id: str | None = None, **named: Any) -> str:
        """A request arrives."""
        life = self.life
        params = self.draw(requests(life.drafts, self.thinking)) | named
        self.plain &= not any(odd in params.get("bad_words", ()) for odd in ODD)
        penalised = any(name.endswith("_penalty") for name in params)
        if "allowed_token_ids" in params and life.switch != "-allowed-tokens":
            life.excuse = "allowed_token_ids reach others on stock"
        if "min_tokens" in params and not penalised and life.asynchronous:
            life.excuse = "stock forgets an output's length, and min_tokens last too long"
        return life.add(req_id=req_id, **params)

    def one(self) -> str | None:
        """A request that came at some time."""
        return self.draw(st.sampled_from(self.live)) if self.live else None

    def abort(self) -> None:
        """A client goes away."""
        if req_id := self.one():
            self.life.abort(req_id)
            self.live.remove(req_id)

    def preempt(self) -> None:
        """All are preempted."""
        # With drafts in flight upstream's scheduler loses count of what it should discard.
        if not (self.life.asynchronous and self.life.drafts):
            self.life.preempt_all()

    def drop(self) -> None:
        """The next step has no drafts."""
        self.life.drop_drafts()

    def again(self) -> None:
        """A request is sent again under its name, whether it is over or not."""
        req_id = self.one()
        if req_id is not None and req_id not in self.sessions:
            # Upstream's scheduler takes what the old one has in flight for the new one's.
            if not one_in(self.draw, 12):
                self.life.read()
            self.life.abort(req_id)
            self.life.strays.add(req_id)
            self.add(req_id)

    def talk(self) -> None:
        """A session begins, or its output becomes a prompt, when the last input is done."""
        session = self.draw(st.sampled_from([None, *self.sessions]))
        if session is None or session not in self.life.scheduler.requests:
            session = f"s{len(self.sessions)}"
            self.sessions.append(session)
            self.life.strays.add(session)
        self.add(session, resumable=True)

    def fail(self) -> None:
        """A block of somebody's fails to load."""
        req_id = self.one()
        if req_id is not None and req_id in self.life.scheduler.requests:
            self.plain = False
            self.life.strays.add(req_id)
            self.life.fail_loads(req_id)

    def cut(self) -> None:
        """The scheduler keeps less of an output than the runner has."""
        if req_id := self.one():
            self.plain = False
            self.life.cuts[req_id] = self.draw(st.integers(1, 4))


def lived(draw: Any, asynchronous: bool, drafts: int) -> None:
    """Draw a life, and live it.

    Raises:
        SetAside: it cannot be compared to its end.
    """
    before = fences.counts().get("bad-words", 0)
    course = Course(draw, asynchronous, drafts)
    course.run()
    if course.plain:
        assert not course.even or course.life.ours.waits <= course.life.stock.waits
        assert fences.counts().get("bad-words", 0) == before


@given(data=st.data())
@settings(max_examples=40)
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("drafts", [0, 2])
def test_any_life(asynchronous: bool, drafts: int, data: st.DataObject) -> None:
    """Requests come, go, are preempted and moved, in any order, at any time."""
    try:
        lived(data.draw, asynchronous, drafts)
    except SetAside:
        reject()


def tally(number: int, count: int, asynchronous: bool, drafts: int) -> Counter[str]:
    """Live until ``count`` lives are equal to their ends; why others were set aside.

    Args:
        number: from which the lives are drawn.
        count: of the equal lives, which are under "equal".
        asynchronous: as for :class:`Life`.
        drafts: as for :class:`Life`.
    """
    found: Counter[str] = Counter()

    @seed(number)
    @settings(max_examples=count, database=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def lives(data: st.DataObject) -> None:
        try:
            lived(data.draw, asynchronous, drafts)
        except SetAside as aside:
            found[str(aside)] += 1
            reject()
        found["equal"] += 1

    lives()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("drafts", [0, 2])
def test_fifteen_hundred_lives(
    asynchronous: bool, drafts: int, number: int, record_property: Callable[[str, object], None]
) -> None:
    """The same ones each time; what is set aside is counted, and made up for by others."""
    found = tally(number, 75, asynchronous, drafts)
    record_property("lives", dict(found))
    assert found["equal"] == 75
