"""Bad words on the device, against upstream's, step by step.

Every test of :class:`support.bad_words.Pair` compares logits of any bits with equality, with
torch's operations and with the kernels under Triton's interpreter.
"""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import modules
from support.bad_words import LAYOUTS, Pair
from support.lives import VOCABULARY, Life, no_room_for_a_third
from vllm.v1.readiness import fences
from vllm.v1.readiness.bad_words import BadWords

WORDS = [[0], [1, 2], [3, 4, 5]]
#: Few, so that words match, also in part.
TOKENS = st.integers(0, 2)


@pytest.fixture(scope="module", params=["torch", "kernels"])
def kernels(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "torch":
        yield None
        return
    with modules.interpreted("bad_word_kernels") as module:
        yield module


def waits() -> int:
    """How often anyone has waited for bad words."""
    return fences.counts().get("bad-words", 0)


@st.composite
def words(draw: Any, vocab: int) -> list[list[int]]:
    """Some are equal, end alike, or end in a token that is none of the logits'."""
    if draw(st.integers(0, 4)) == 0:
        return []
    last = st.one_of(*[TOKENS] * 5, st.integers(0, vocab + 2), st.just(2**31 - 1))
    word = st.tuples(st.lists(TOKENS, max_size=4), last).map(lambda parts: [*parts[0], parts[1]])
    return list(draw(st.lists(word, min_size=1, max_size=6)))


@given(data=st.data(), vocab=st.sampled_from([1, 3, 5, 37]))
@settings(max_examples=60)
def test_any_stream(kernels: Any, data: st.DataObject, vocab: int) -> None:
    """Requests come, go, move and are cut back; drafts are accepted or not."""
    pair = Pair(vocab, kernels)
    draw = data.draw
    for _ in range(draw(st.integers(2, 12))):
        for _ in range(draw(st.sampled_from([0, 0, 1, 3]))):
            if len(pair.req_ids) < 6:
                pair.join(draw(words(vocab)), draw(st.lists(TOKENS, max_size=6)))
        what = draw(st.sampled_from(["leave", "swap", "cut", "cut", "nothing", "nothing"]))
        count = len(pair.req_ids)
        if what == "leave" and count:
            pair.leave(draw(st.sampled_from(pair.req_ids)))
        if what == "swap" and count > 1:
            pair.swap(*draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2)))
        if what == "cut" and count:
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


def test_a_word_is_masked_where_the_output_begins_it(kernels: Any) -> None:
    """Not before, nor where the prompt does; a word of one token always is."""
    pair = Pair(9, kernels)
    pair.join([[1, 2, 5], [7]])
    pair.join([[3, 4]], [3])
    pair.join([], [1, 2])
    pair.refresh()
    masked = []
    for token in (1, 2, 1, 2, 1):
        before = pair.masked
        pair.check()
        masked.append(pair.masked - before)
        pair.sample([[token]] * 3)
    # The first row's 7 in every step, its 5 after 1, 2; the second row's 4 at first.
    assert masked == [2, 1, 2, 1, 2]


def test_words_and_tails_longer_than_a_block(kernels: Any) -> None:
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


def test_tokens_of_wide_rows_and_of_any_integer(kernels: Any) -> None:
    """The sampler's ids may be int64, and a part of a wider tensor."""
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


def test_narrower_logits_have_fewer_tokens(kernels: Any) -> None:
    pair = Pair(9, kernels, width=6)
    pair.join([[1, 5], [1, 6], [1, 2, 8], [5], [6], [7, 3]], [1])
    pair.refresh()
    pair.check()
    pair.check([[1, 7, 2]])
    pair.width = 9
    pair.check([[1, 7, 2]])


def test_wider_logits_are_upstreams(kernels: Any) -> None:
    pair = Pair(9, kernels, width=12)
    pair.join([[1, 5]], [1])
    pair.refresh()
    logits, _ = pair.logits(1, "contiguous")
    pair.ours.readiness.begin_step()
    pair.ours.readiness.prepare(logits, None)
    assert BadWords.take(pair.ours.sampling_metadata, logits)[0] is None


@pytest.mark.parametrize("odd", [[], [-1], [-2, 3], [1, -1, 3], [2**31], [2**31, 0]])
def test_words_that_upstream_alone_can_read(odd: list[int]) -> None:
    """As long as a request with such words is there, upstream's code serves all."""
    pair = Pair(9)
    pair.join([[1, 2]], [1])
    pair.refresh()
    pair.check()
    req_id = pair.join([[1], odd])
    pair.refresh()
    logits, _ = pair.logits(2, "contiguous")
    pair.ours.readiness.begin_step()
    pair.ours.readiness.prepare(logits, None)
    assert BadWords.take(pair.ours.sampling_metadata, logits)[0] is None
    assert pair.ours.readiness.host_needs_drafts()
    pair.leave(req_id)
    pair.refresh()
    pair.check()


def test_what_is_not_the_live_batchs() -> None:
    """Other lists, another dict of words, logits of another shape."""
    pair = Pair(9)
    pair.join([[1, 2]], [1])
    pair.join([], [1])
    pair.refresh()
    pair.check()
    logits, _ = pair.logits(2, "contiguous")
    metadata = pair.ours.sampling_metadata
    assert BadWords.take(metadata, logits)[0] is pair.bad_words
    assert BadWords.take(metadata, logits[:1])[0] is None
    assert BadWords.take(metadata, logits[:, :-1])[0] is None
    other = copy.copy(metadata)
    other.output_token_ids = list(metadata.output_token_ids)
    assert BadWords.take(other, logits)[0] is None
    other = copy.copy(metadata)
    other.bad_words_token_ids = dict(metadata.bad_words_token_ids)
    assert BadWords.take(other, logits)[0] is None
    other.bad_words_token_ids = {}
    assert BadWords.take(other, logits)[0] is None


def test_upstreams_path_finds_the_lists_settled() -> None:
    """Words that somebody changed, over the live rows with a step in flight."""
    life = Life()
    life.add([1, 2], bad_words=WORDS)
    life.run(3)
    batch = life.ours.batch
    assert batch.readiness.history.unsettled(0)
    changed = copy.copy(batch.sampling_metadata)
    changed.bad_words_token_ids = {0: [[5]]}
    assert BadWords.take(changed, torch.randn(1, VOCABULARY))[0] is None
    assert not batch.readiness.history.unsettled(0)


@pytest.mark.parametrize("drafts", [0, 3])
def test_nothing_waits(kernels: Any, drafts: int) -> None:
    """Steps with bad words and penalties, among others, and words that do match."""
    before = waits()
    life = Life(5, drafts=drafts)
    life.ours.batch.readiness.bad_words.kernels = kernels
    life.ours.batch.readiness.warm_up()
    likely: dict[str, Any] = {"logit_bias": {0: 6.0, 1: 6.0}, "max_tokens": 25}
    life.add([1, 2], bad_words=[[0, 1], [1, 1, 0], [1, 1, 1, 1]], **likely)
    life.add([3], bad_words=[[0, 0, 0], [2]], presence_penalty=0.5, **likely)
    life.add([4, 5], max_tokens=20)
    life.step()
    life.add(list(range(30)), bad_words=[[1]], **likely)
    life.finish()
    assert life.ours.waits == 0
    assert life.stock.waits > 5
    assert waits() == before


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_sample_of_a_prefill_chunk_is_not_appended(asynchronous: bool) -> None:
    life = Life(asynchronous=asynchronous, max_tokens_a_step=8)
    req_id = life.add(list(range(20)), bad_words=[[0, 1, 2]])
    slots = life.ours.batch.readiness.bad_words._slots
    for _ in range(2):
        life.step()
        assert life.ours.runner.discard_request_mask.np[0]
        assert slots[req_id].tolist() == [-1, -1]
    life.step()
    assert slots[req_id].tolist() == [-1, *life.truth(req_id)]
    life.finish()


def test_switched_off_upstream_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the history's lists, and waits by name."""
    monkeypatch.setenv("VLLM_READINESS", "-bad-words")
    before = waits()
    life = Life()
    assert life.ours.batch.readiness.bad_words is None
    assert life.ours.batch.readiness.penalties is not None
    life.add([1, 2, 3], bad_words=WORDS)
    life.add([1, 2], max_tokens=20)
    life.finish()
    assert life.ours.waits == waits() - before == life.stock.waits > 5


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_an_output_is_cut_back_with_tokens_in_flight(asynchronous: bool, kept: int) -> None:
    """The tail is made anew from what is left, and what goes on is compared by the life."""
    life = Life(asynchronous=asynchronous)
    likely: dict[str, Any] = {"logit_bias": {0: 9.0, 1: 9.0}, "max_tokens": 30}
    req_id = life.add([1, 2, 3], bad_words=[[0, 1, 0], [1, 1], [0, 0, 0, 0]], **likely)
    life.run(5)
    life.faithful = False
    for half in (life.stock, life.ours):
        half.runner.requests[req_id].num_computed_tokens = 3
    scheduled = life.scheduler.schedule()
    cached = scheduled.scheduled_cached_reqs
    cached.num_output_tokens[cached.req_ids.index(req_id)] = kept
    life._run(scheduled)
    ours = life.ours.batch.req_output_token_ids[0]
    assert ours is not None
    assert len(ours) == kept + 1
    tail = life.ours.batch.readiness.bad_words._slots[req_id].tolist()
    known = life.settled()[req_id]
    assert tail == ([-1] * 3 + known)[-3:]


def test_a_load_fails() -> None:
    """Sync: the scheduler drops the token of a step whose KV blocks failed to load."""
    life = Life(asynchronous=False)
    likely: dict[str, Any] = {"logit_bias": {0: 9.0, 1: 9.0}, "max_tokens": 30}
    req_id = life.add(list(range(6)), bad_words=[[0, 1, 0], [1, 1], [0, 0, 0]], **likely)
    life.run(4)
    life.fail_loads(req_id)
    life.run(3)
    tail = life.ours.batch.readiness.bad_words._slots[req_id].tolist()
    assert tail == life.truth(req_id)[-2:]
    life.finish()


def test_without_room_upstreams_path_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third slot finds no room; once a request has left, slots are tried again."""
    life = Life()
    bad_words = life.ours.batch.readiness.bad_words
    no_room_for_a_third(monkeypatch, bad_words)
    first, _ = (life.add([n, 1], bad_words=WORDS) for n in range(2))
    life.run(2)
    assert bad_words.complete
    life.add([5], bad_words=WORDS)
    life.step()
    assert not bad_words.complete
    waited = life.ours.waits
    life.run(2)
    assert life.ours.waits == waited + 2
    life.abort(first)
    life.run(2)
    assert bad_words.complete
    life.finish()


def test_a_rank_without_bad_words_takes_nothing() -> None:
    pair = Pair(9)
    pair.join([])
    pair.refresh()
    pair.check()
    assert pair.bad_words._slots == {}
    assert not pair.bad_words.serving
