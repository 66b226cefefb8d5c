"""Whole lives of a batch: ours beside upstream's, step by step.

After every step :class:`support.lives.Life` compares, with equality, the logits that both
halves sample from, the tokens, and what is always true of our history.
"""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.lives import DRAFTED, VOCABULARY, Life
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


@st.composite
def requests(draw: Any, drafts: int, thinking: bool) -> dict[str, Any]:
    """The keywords of :meth:`Life.add`."""
    params: dict[str, Any] = dict(draw(PENALTIES))
    if thinking and draw(st.integers(0, 3)) > 0:
        params["thinking_token_budget"] = draw(st.sampled_from([0, 1, 2, 3, 5, 8, 40]))
    # Upstream forgets how long the output of a request without penalties is when one
    # with penalties joins, so that its min_tokens last too long: see test_cases, case 7.
    if params and draw(st.booleans()):
        params |= {"min_tokens": draw(st.integers(1, 8)), "stop_token_ids": [0, 1, 2]}
    if draw(st.integers(0, 1)) == 0:
        tokens = st.one_of(*[st.sampled_from(FREQUENT)] * 4, TOKENS)
        words = st.lists(st.lists(tokens, min_size=1, max_size=4), min_size=1, max_size=6)
        params["bad_words"] = draw(words)
        params["logit_bias"] = dict.fromkeys(FREQUENT, 6.0)
    if not drafts and draw(st.integers(0, 3)) == 0:
        params["temperature"] = 0.8
    return params | {
        "prompt": draw(st.lists(TOKENS, max_size=27))
        + draw(st.lists(MARKED, min_size=1, max_size=3)),
        "max_tokens": draw(st.integers(params.get("min_tokens", 1), 18)),
    }


@given(data=st.data())
@settings(max_examples=40)
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("drafts", [0, 2])
def test_any_life(asynchronous: bool, drafts: int, data: st.DataObject) -> None:
    """Requests come, go, are preempted and moved, in any order, at any time."""
    markers = data.draw(st.none() | st.tuples(MARKERS, MARKERS))
    life = Life(
        data.draw(st.integers(0, 1000)),
        asynchronous,
        drafts,
        max_num_seqs=data.draw(st.integers(1, 6)),
        num_blocks=data.draw(st.sampled_from([18, 26, 80])),
        max_model_len=data.draw(st.sampled_from([40, 96])),
        reorder_threshold=data.draw(st.sampled_from([None, 1 + drafts])),
        processor=not drafts and data.draw(st.booleans()),
        trimmed=asynchronous and drafts > 0 and data.draw(st.booleans()),
        markers=markers,
    )
    live: list[str] = []
    before = fences.counts().get("bad words", 0)
    for _ in range(data.draw(st.integers(5, 25))):
        for _ in range(data.draw(st.sampled_from([0, 0, 1, 3]))):
            live.append(life.add(**data.draw(requests(drafts, markers is not None))))
            if data.draw(st.integers(0, 5)) == 0:
                life.structured.add(live[-1])
        what = data.draw(st.sampled_from(["abort", "preempt", "drop", *["nothing"] * 7]))
        if what == "abort" and live:
            life.abort(live.pop(data.draw(st.integers(0, len(live) - 1))))
        # With drafts in flight upstream's scheduler loses count of what it should discard.
        if what == "preempt" and not (asynchronous and drafts):
            life.preempt_all()
        if what == "drop":
            life.drop_drafts()
        life.step(arrives=data.draw(st.booleans()), read_first=data.draw(st.integers(0, 3)) == 0)
    life.finish()
    assert life.ours.waits <= life.stock.waits
    assert fences.counts().get("bad words", 0) == before
