"""Bad words on the device, against upstream's, step by step.

Every test of :class:`support.bad_words.Pair` compares logits of any bits with equality, with
torch's operations and with the kernels under Triton's interpreter.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import modules
from support.bad_words import LAYOUTS, Pair
from support.examples import draws
from support.lockstep import LockstepRun
from vllm.v1.readiness.engine import fences
from vllm.v1.readiness.sample.bad_words import BadWords

#: Few, so that words match, also in part.
TOKENS = st.integers(0, 2)


@pytest.fixture(scope="module", params=["torch", "kernels"])
def kernels(request: pytest.FixtureRequest) -> Iterator[bool]:
    """True to run the kernels in Triton's interpreter, False for torch's operations."""
    if request.param == "torch":
        yield False
        return
    with modules.kernels_interpreted("bad_words"):
        yield True


@st.composite
def words(draw: Any, vocab: int) -> list[list[int]]:
    """Some are equal, end alike, or end in a token that is none of the logits'."""
    if draw(st.integers(0, 4)) == 0:
        return []
    last = st.one_of(*[TOKENS] * 5, st.integers(0, vocab + 2), st.just(2**31 - 1))
    word = st.tuples(st.lists(TOKENS, max_size=4), last).map(lambda parts: [*parts[0], parts[1]])
    return list(draw(st.lists(word, min_size=1, max_size=6)))


@given(data=st.data(), vocab=st.sampled_from([1, 3, 5, 37]))
@draws(12)
def test_any_stream_of_requests_has_upstreams_bits(
    kernels: bool, data: st.DataObject, vocab: int
) -> None:
    """Requests come, go, move and are cut back; drafts are accepted or not."""
    pair = Pair(vocab, kernels)
    draw = data.draw
    for _ in range(draw(st.integers(2, 12))):
        for _ in range(draw(st.sampled_from([0, 0, 1, 3]))):
            if len(pair.req_ids) < 6:
                pair.join(draw(words(vocab)), draw(st.lists(TOKENS, max_size=6)))
        event = draw(st.sampled_from(["leave", "swap", "cut", "cut", "nothing", "nothing"]))
        count = len(pair.req_ids)
        if event == "leave" and count:
            pair.leave(draw(st.sampled_from(pair.req_ids)))
        if event == "swap" and count > 1:
            pair.swap(*draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2)))
        if event == "cut" and count:
            row = draw(st.integers(0, count - 1))
            pair.cut(pair.req_ids[row], draw(st.integers(0, len(pair.outputs()[row]))))
        pair.refresh()
        count = len(pair.req_ids)
        if not count:
            continue
        spread = None
        if draw(st.booleans()):
            ids = st.lists(TOKENS, max_size=4)
            spread = draw(st.lists(ids, min_size=count, max_size=count))
        pair.check(spread, draw(st.sampled_from(LAYOUTS)))
        sampled = []
        for row in range(count):
            accepted = draw(st.integers(0, len(spread[row]))) if spread else 0
            sampled.append([*(spread[row][:accepted] if spread else ()), draw(TOKENS)])
        rows = st.sampled_from(range(count))
        pair.sample(sampled, draw(st.lists(rows, max_size=2, unique=True)))


def test_words_and_tails_may_be_longer_than_a_block(kernels: bool) -> None:
    """A block of the kernels is 32 of them."""
    pair = Pair(50, kernels)
    long = [n % 3 for n in range(72)]
    pair.join([[n, n + 1] for n in range(33)] + [[*long, 9], [*long[-33:], 8], [*long[:64], 7]])
    pair.join([[2, 0, 1]])
    pair.refresh()
    pair.check()
    pair.sample([long[:24], [2]])
    pair.sample([long[24:70], [2]])
    pair.check([long[70:], [2]])
    pair.sample([long[70:], [2]])
    before = pair.masked
    pair.check()
    assert pair.masked - before == 3  # after a 2: its 3, and the 9 and 8 of the long ones
    pair.sample([long[1:3] * 60, [2]])
    pair.check()


def test_sampled_ids_may_be_int64_and_a_part_of_a_wider_tensor(kernels: bool) -> None:
    pair = Pair(9, kernels)
    req_ids = [pair.join([[1, 2, 3], [2, 4]]) for _ in range(3)]
    pair.refresh()
    pair.check()
    wide = torch.tensor([[1, 8, 2, 8], [2, 8, -1, 8], [5, 8, 2, 8]])
    discarded = torch.tensor([False, False, True])
    pair.ours.readiness.observe_sampled(wide[:, ::2], discarded)
    for batch in (pair.stock, pair.ours):
        for req_id, ids in zip(req_ids, ([1, 2], [2], []), strict=True):
            batch.req_output_token_ids[batch.req_id_to_index[req_id]].extend(ids)
    before = pair.masked
    pair.check()
    assert pair.masked - before == 3


def test_narrower_logits_are_masked_within_their_width(kernels: bool) -> None:
    pair = Pair(9, kernels, width=6)
    pair.join([[1, 5], [1, 6], [1, 2, 8], [5], [6], [7, 3]], [1])
    pair.refresh()
    pair.check()
    pair.check([[1, 7, 2]])
    pair.width = 9
    pair.check([[1, 7, 2]])


def left_to_upstream(pair: Pair, rows: int) -> bool:
    """Prepare a step, and return whether upstream's code serves it."""
    logits, _ = pair.logits(rows, "contiguous")
    pair.ours.readiness.history.begin_step()
    pair.ours.readiness.begin_sampling(logits, None)
    return BadWords.take(pair.ours.sampling_metadata, logits)[0] is None


def test_wider_logits_are_upstreams(kernels: bool) -> None:
    pair = Pair(9, kernels, width=12)
    pair.join([[1, 5]], [1])
    pair.refresh()
    assert left_to_upstream(pair, 1)


@pytest.mark.parametrize("odd", [[], [-1], [-2, 3], [1, -1, 3], [2**31], [2**31, 0]])
def test_upstream_serves_all_while_one_request_has_odd_words(odd: list[int]) -> None:
    pair = Pair(9)
    pair.join([[1, 2]], [1])
    pair.refresh()
    pair.check()
    req_id = pair.join([[1], odd])
    pair.refresh()
    assert left_to_upstream(pair, 2)
    assert pair.ours.readiness.host_needs_drafts()
    pair.leave(req_id)
    pair.refresh()
    pair.check()


@pytest.mark.parametrize("drafts", [0, 3])
def test_nothing_waits_beside_penalties_and_prefill_chunks(kernels: bool, drafts: int) -> None:
    before = fences.counts().get("bad-words", 0)
    lockstep = LockstepRun(5, drafts=drafts)
    lockstep.ours.batch.readiness.bad_words.kernels = kernels
    lockstep.ours.batch.readiness.warm_up()
    likely: dict[str, Any] = {"logit_bias": {0: 6.0, 1: 6.0}, "max_tokens": 12}
    lockstep.add([1, 2], bad_words=[[0, 1], [1, 1, 0], [1, 1, 1, 1]], **likely)
    lockstep.add([3], bad_words=[[0, 0, 0], [2]], presence_penalty=0.5, **likely)
    lockstep.add([4, 5])
    lockstep.step()
    lockstep.add(list(range(30)), bad_words=[[1]], **likely)
    lockstep.finish()
    assert lockstep.ours.waits == 0
    assert lockstep.stock.waits > 5
    assert fences.counts().get("bad-words", 0) == before
