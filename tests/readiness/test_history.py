"""The history on the host: who waits for it, and when it is settled.

Lives compare ours with upstream's after every step, and with twins of ours whose copies come
early and late; see :class:`support.lives.Life`. Cuts, preemption, sessions, pipelines and
trimmed drafts are drawn in test_lives.
"""

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import modules
from support.batches import Spec, empty, state
from support.lives import BLOCK, VOCABULARY, Life
from vllm.v1.readiness import fences

PENALTY: dict[str, Any] = {"repetition_penalty": 1.3, "frequency_penalty": 0.4}
#: Words that complete themselves, with a bias that makes their tokens likely.
WORDS: dict[str, Any] = {
    "bad_words": [[0, 1], [1, 1, 0], [1, 1, 1, 1]],
    "logit_bias": {0: 6.0, 1: 6.0},
}
STOP = list(range(20))


@pytest.mark.parametrize(
    ("named", "params", "owner"),
    [
        ({}, {"bad_words": [[0], [1, 2], [3, 4, 5]]}, None),
        ({}, {"bad_words": [[0], [1, 2], [-1]]}, "bad-words"),  # upstream's to read
        ({}, {"min_tokens": 6, "stop_token_ids": STOP}, None),
        ({}, {"logit_bias": {3: 4.0, 5: -4.0}}, None),
        ({"processor": "user"}, {}, "logits-processors"),
        # With drafts in flight a length is a guess, which upstream does not make here.
        ({"drafts": 2}, {"min_tokens": 9, "stop_token_ids": STOP[:4]}, "min-tokens"),
    ],
)
def test_a_fence_belongs_to_the_reader_that_needs_it(
    named: dict[str, Any], params: dict[str, Any], owner: str | None
) -> None:
    before = dict(fences.counts())
    life = Life(**named)
    life.add([1, 2, 3], **PENALTY, **params)
    life.add([4, 5], **PENALTY)
    life.finish()
    added = {name for name, n in fences.counts().items() if n > before.get(name, 0)}
    assert added == ({owner} if owner else set())


def test_a_penalised_request_joins_others_without_a_wait() -> None:
    """Upstream waits, and forgets the tokens that the others have."""
    life = Life()
    others = [life.add([n], max_tokens=40) for n in range(3)]
    life.run(6)
    late = life.add([1, 2], **PENALTY)
    life.structured = {late}
    life.run(6)
    assert life.ours.waits == 0
    assert life.stock.waits > 3
    settled = life.settled()
    assert settled == {req_id: life.truth(req_id) for req_id in (*others, late)}
    assert all(token % 2 == 0 for token in settled[late])
    assert any(token % 2 for token in settled[others[0]])
    # For that, upstream's min_tokens last too long for the others.
    theirs = life.stock.batch.req_output_token_ids[0]
    assert theirs is not None
    assert len(theirs) < len(settled[others[0]])


def test_min_tokens_count_drafts_beside_bad_words_as_upstreams_do() -> None:
    """Upstream keeps every list where one request has bad words, also without penalties."""
    life = Life(drafts=2, max_tokens_a_step=12)
    life.add([1, 2], min_tokens=12, max_tokens=30, stop_token_ids=[0, 1, 2])
    life.add([3, 4] * 44, max_tokens=4, bad_words=[[0, 1]])
    life.faithful = False
    life.finish()
    assert life.drafted


@pytest.mark.parametrize("processor", ["user", "plugin"])
def test_a_processor_reads_every_token_whenever_copies_arrive(processor: str) -> None:
    """One of an entry point reads the lists that stock gives to one named at the start."""
    life = Life(processor=processor, twins=True)
    req_ids = [life.add([n, 1], max_tokens=12) for n in range(3)]
    for _ in range(8):
        life.step()
        spy = life.ours.spy
        assert spy is not None
        for row, output in spy.seen[-1].items():
            req_id = life.ours.batch.req_ids[row]
            assert output == life.truth(req_id)[: len(output)]
    assert req_ids == life.ours.batch.req_ids
    life.finish()


def test_without_the_fix_a_plugin_processor_reads_stocks_placeholders() -> None:
    life = Life(processor="plugin", switch="-plugin-processors", twins=True)
    life.add([1, 2], max_tokens=12)
    for number in range(8):
        life.step()
        for half in life.halves:
            assert half.spy is not None
            assert half.spy.seen[-1] == {0: [-1] * number}
    life.finish()


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("drafts", [0, 2])
def test_a_runner_that_samples_by_code_of_its_own_is_served(
    asynchronous: bool, drafts: int
) -> None:
    """Its steps are never observed: slots are built anew on each."""
    life = Life(asynchronous=asynchronous, drafts=drafts, own="sample_tokens")
    for n in range(3):
        life.add([n, 1], max_tokens=12, **PENALTY, **WORDS)
    life.finish()
    assert not asynchronous or life.ours.waits > 5


@pytest.mark.parametrize("drafts", [0, 2])
def test_steps_in_flight_are_bounded_where_none_is_begun(drafts: int) -> None:
    """A runner that updates its batch by code of its own."""
    life = Life(drafts=drafts, own="_update_states")
    for n in range(3):
        life.add([n, 1], max_tokens=30, **(PENALTY if n else {}))
    history = life.ours.batch.readiness.history
    while life.scheduler.requests:
        life.step()
        assert len(history.in_flight) <= 1
    assert life.steps > 20 or drafts


def tally(tokens: list[int]) -> dict[int, int]:
    return {token: tokens.count(token) for token in set(tokens)}


def counts_of(life: Life, req_id: str) -> dict[int, int]:
    """Token to how often the device has counted it for a request."""
    slot = life.ours.batch.readiness.penalties._slots[req_id]
    assert slot is not None
    counts = slot & 0x7FFFFFFF
    return {token: int(counts[token]) for token in counts.nonzero().flatten().tolist()}


def step_keeping(life: Life, req_id: str, kept: int) -> None:
    """Run a step whose scheduler keeps only so many of a request's output tokens."""
    life.faithful = False
    scheduled = life.scheduler.schedule()
    cached = scheduled.scheduled_cached_reqs
    cached.num_output_tokens[cached.req_ids.index(req_id)] = kept
    life._run(scheduled)


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_a_cut_drops_tokens_in_flight_that_it_leaves_no_place_for(kept: int) -> None:
    life = Life()
    req_id = life.add([1, 2, 3], **PENALTY)
    life.add([4, 5], **PENALTY)
    life.run(3)
    for half in (life.stock, life.ours):
        half.runner.requests[req_id].num_computed_tokens = 3
    step_keeping(life, req_id, kept)
    assert sum(counts_of(life, req_id).values()) == kept + 1
    for half in (life.stock, life.ours):
        assert len(half.runner.requests[req_id].output_token_ids) == kept + 1
    # The step before the cut arrives: none of it is taken for the newest token.
    for one in life.in_flight[0][2]:
        one.complete()
    live = life.ours.batch.readiness
    live.begin_step()
    assert live.history.unsettled(life.ours.batch.req_id_to_index[req_id])
    known = life.settled()[req_id]
    assert len(known) == kept + 1
    assert counts_of(life, req_id) == tally(known)


def accepted(life: Life, req_id: str) -> int:
    """Return how many drafts of a request the step in flight has accepted."""
    _, output, copies = life.in_flight[-1]
    row = copies[0].source[output.req_id_to_index[req_id]]
    return int((row >= 0).sum()) - 1


@pytest.mark.parametrize("kept", range(6))
def test_a_cut_keeps_as_many_accepted_drafts_as_upstream(kept: int) -> None:
    life = Life(drafts=3)
    # Drafts are of few tokens: a penalty that makes those likely gets drafts accepted.
    req_id = life.add([1, 2, 3], max_tokens=60, frequency_penalty=-0.5)
    life.add([4, 5], max_tokens=60, **PENALTY)
    life.run(2)
    while not accepted(life, req_id) > 1:
        life.step()
    known = life.scheduler.requests[req_id].num_output_tokens
    step_keeping(life, req_id, known + kept - 2)
    life.ours.batch.readiness.history.settle_older("test")
    theirs, ours = (
        half.runner.requests[req_id].output_token_ids for half in (life.stock, life.ours)
    )
    assert ours == theirs


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_sample_of_a_prefill_chunk_is_neither_counted_nor_written(asynchronous: bool) -> None:
    life = Life(asynchronous=asynchronous, max_tokens_a_step=8)
    req_id = life.add(list(range(20)), **PENALTY, bad_words=[[0, 1, 2]])
    for _ in range(2):
        life.step()
        assert counts_of(life, req_id) == {}
        assert life.ours.batch.readiness.bad_words._slots[req_id].tolist() == [-1, -1]
        assert life.settled() == {req_id: []}
        assert (life.ours.batch.token_ids_cpu[0, 20:] == 0).all()
    life.step()
    assert len(counts_of(life, req_id)) == 1
    life.finish()


class _Never:
    """The event of a copy that never arrives."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        raise AssertionError("somebody waits for it")


def test_a_step_is_not_waited_for_once_its_requests_have_left() -> None:
    """A pipeline of three: each micro-batch has left before the next one begins."""
    batch = empty(modules.overlaid, VOCABULARY)
    live = batch.readiness
    for name in "abcd":
        live.begin_step()
        for req_id in list(batch.req_ids):
            batch.remove_request(req_id)
        batch.add_request(state(Spec([1], [], {}), name))
        batch.refresh_metadata()
        live.prepare(torch.zeros(1, VOCABULARY), None)
        batch.prev_req_id_to_index = {name: 0}
        assert live.place(256)
        assert live.expect(torch.tensor([[7]], dtype=torch.int32), _Never())
    assert len(live.history.in_flight) <= 2


def test_rejected_drafts_leave_the_same_lists_whenever_copies_arrive() -> None:
    """The engine has read a step; a rank that lags has not, and builds a slot anew."""
    life = Life(drafts=2, twins=True)
    life.twins[1].reads = False
    life.add([1, 2], max_tokens=30, **PENALTY)
    life.run(4)
    life.step(read_first=True)
    early, late = life.twins
    assert early.batch.req_output_token_ids == late.batch.req_output_token_ids


@pytest.fixture
def _uncollected() -> Iterator[None]:
    """Nothing but reference counts frees memory."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_uncollected")
@pytest.mark.parametrize("processor", [None, "plugin"])
def test_a_batch_that_is_replaced_is_free_at_once(
    processor: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner replaces it when block sizes differ from those that it assumed."""
    life = Life(processor=processor, markers=([36], [35]))
    life.add([1, 2], thinking_token_budget=3, **PENALTY, **WORDS)
    life.run(3)
    half = life.ours
    vars(half.runner).update(
        max_encoder_len=0,
        max_num_reqs=life.max_num_seqs,
        max_num_tokens=life.max_tokens_a_step,
        pin_memory=False,
        model_config=SimpleNamespace(get_vocab_size=lambda: VOCABULARY),
        vllm_config=SimpleNamespace(reasoning_config=life.reasoning),
        _init_block_sizes=[BLOCK],
        _init_kernel_block_sizes=[BLOCK],
    )
    replaced = [weakref.ref(each) for each in (half.batch, half.batch.readiness)]
    del half.batch
    assert all(reference() is not None for reference in replaced)
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=2 * BLOCK))
    # It imports upstream's.
    kind = modules.overlaid(modules.INPUT_BATCH).InputBatch
    monkeypatch.setattr(modules.overlaid(modules.RUNNER), "InputBatch", kind)
    half.runner.may_reinitialize_input_batch(SimpleNamespace(kv_cache_groups=[group]), [BLOCK])
    assert all(reference() is None for reference in replaced)
    half.runner.input_batch.readiness.begin_step()
