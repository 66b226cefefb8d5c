"""The cases that a history on the device must get right, one by one.

Each runs beside upstream (see :class:`support.lives.Life`, which compares after every
step); what is asserted here is that the case happened, and what else must be true of it.
"""

import copy
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import modules
from support.batches import Spec, empty, fill, same_bits, state, stock_penalties
from support.lives import BLOCK, VOCABULARY, Life, no_room_for_a_third
from vllm.v1.readiness import fences
from vllm.v1.readiness.penalties import Penalties

PENALTY: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.4,
    "presence_penalty": -0.6,
}


def slot_of(life: Life, req_id: str) -> torch.Tensor:
    slot = life.ours.batch.readiness.penalties._slots[req_id]
    assert slot is not None
    return slot


def counts_of(life: Life, req_id: str) -> dict[int, int]:
    """Token to how often the device has counted it for a request."""
    counts = slot_of(life, req_id) & 0x7FFFFFFF
    return {token: int(counts[token]) for token in counts.nonzero().flatten().tolist()}


def tally(tokens: list[int]) -> dict[int, int]:
    return {token: tokens.count(token) for token in set(tokens)}


@pytest.mark.parametrize("asynchronous", [True, False])
def test_1_a_sample_of_a_prefill_chunk_is_neither_counted_nor_written(asynchronous: bool) -> None:
    life = Life(asynchronous=asynchronous, max_tokens_a_step=8)
    req_id = life.add(list(range(20)), **PENALTY)
    for _ in range(2):
        life.step()
        assert life.ours.runner.discard_request_mask.np[0]
        assert counts_of(life, req_id) == {}
        assert life.settled() == {req_id: []}
        assert (life.ours.batch.token_ids_cpu[0, 20:] == 0).all()
    life.step()
    assert len(counts_of(life, req_id)) == 1
    life.finish()


@pytest.mark.parametrize("drafts", [0, 2])
def test_2_rows_move_with_samples_in_flight(drafts: int) -> None:
    """The first request's end moves the last row; a long prompt is sorted behind decodes."""
    life = Life(drafts=drafts, reorder_threshold=1 + drafts)
    first = life.add([1], max_tokens=4 if drafts else 3)
    others = [life.add([2, 3, n], **PENALTY) for n in range(4)]
    life.run(3)
    rows = list(life.ours.batch.req_ids)
    assert life.in_flight
    late = life.add(list(range(30)), **PENALTY)
    orders = [rows]
    for _ in range(4):
        life.step()
        orders.append(list(life.ours.batch.req_ids))
    assert any(first not in order for order in orders)
    assert any(late in order for order in orders)
    # Some request's row changed while it stayed in the batch.
    assert any(
        one.index(req_id) != other.index(req_id)
        for one, other in itertools.pairwise(orders)
        for req_id in {*one} & {*other}
    )
    for req_id in others:
        known = life.truth(req_id)
        if req_id in life.ours.batch.req_id_to_index:
            assert counts_of(life, req_id) == tally(known)
    life.finish()


def test_3_a_slot_is_taken_by_another_at_once() -> None:
    """A request is aborted with a step in flight; another gets its row in the next step."""
    life = Life(max_num_seqs=1)
    one = life.add([1, 2], **PENALTY)
    two = life.add([3, 4, 5], **PENALTY)
    life.run(3)
    assert life.ours.batch.req_ids == [one]
    assert life.in_flight
    life.abort(one)
    life.step()
    assert life.ours.batch.req_ids == [two]
    assert one not in life.ours.batch.readiness.penalties._slots
    assert counts_of(life, two) == tally(life.truth(two))
    assert (slot_of(life, two) < 0).nonzero().flatten().tolist() == [3, 4, 5]
    life.finish()


def test_3_the_same_name_again() -> None:
    """A request is aborted and sent again under its name before the next step."""
    life = Life()
    life.add([1, 2, 3], req_id="same", **PENALTY)
    life.run(4)
    assert len(life.truth("same")) == 4
    life.abort("same")
    life.faithful = False  # what is in flight is the other's
    life.add([4], req_id="same", **PENALTY)
    life.step()
    assert sum(counts_of(life, "same").values()) == 1
    assert (slot_of(life, "same") < 0).nonzero().flatten().tolist() == [4]
    life.finish()


def test_4_preempted_and_resumed() -> None:
    """The history comes back from the scheduler, as a new list."""
    life = Life(num_blocks=14, max_num_seqs=4)
    req_ids = [life.add([n, 5, 6], max_tokens=30, **PENALTY) for n in range(4)]
    lists: dict[str, set[int]] = {req_id: set() for req_id in req_ids}
    kept = []
    while life.scheduler.requests:
        life.step()
        for row, req_id in enumerate(life.ours.batch.req_ids):
            output = life.ours.batch.req_output_token_ids[row]
            kept.append(output)  # or its identity might be used again
            lists[req_id].add(id(output))
            prefilling = life.ours.runner.discard_request_mask.np[row]
            if req_id in life.scheduler.requests and not prefilling:
                assert counts_of(life, req_id) == tally(life.truth(req_id))
    assert life.preemptions
    assert any(len(seen) > 1 for seen in lists.values())


@pytest.mark.parametrize("asynchronous", [True, False])
def test_4_not_scheduled_for_a_step_and_added_again(asynchronous: bool) -> None:
    life = Life(asynchronous=asynchronous)
    one, two = (life.add([n, 7], max_tokens=10, **PENALTY) for n in (1, 2))
    life.run(3)
    request = life.scheduler.requests[one]
    life.scheduler.running.remove(request)
    life.step()
    assert life.ours.batch.req_ids == [two]
    life.step()
    life.scheduler.running.append(request)
    life.step()
    assert set(life.ours.batch.req_ids) == {one, two}
    assert counts_of(life, one) == tally(life.truth(one))
    life.finish()


def test_5_an_output_is_cut_back_after_a_failed_load() -> None:
    """Sync: the scheduler drops the token of a step whose KV blocks failed to load."""
    life = Life(asynchronous=False)
    req_id = life.add(list(range(6)), **PENALTY)
    life.run(4)
    before = life.truth(req_id)
    life.fail_loads(req_id)
    life.step()
    assert life.truth(req_id) == before
    held = life.ours.batch.req_output_token_ids[0]
    assert held is not None
    assert len(held) == len(before) + 1
    life.step()
    assert counts_of(life, req_id) == tally(life.truth(req_id))
    life.finish()


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_5_cut_with_tokens_in_flight(kept: int) -> None:
    """Async: whatever the cut leaves no place for is dropped, counted or not."""
    life = Life()
    req_id = life.add([1, 2, 3], **PENALTY)
    life.add([4, 5], **PENALTY)
    life.run(3)
    life.faithful = False
    for half in (life.stock, life.ours):
        half.runner.requests[req_id].num_computed_tokens = 3
    scheduled = life.scheduler.schedule()
    cached = scheduled.scheduled_cached_reqs
    cached.num_output_tokens[cached.req_ids.index(req_id)] = kept
    life._run(scheduled)
    assert sum(counts_of(life, req_id).values()) == kept + 1
    for half in (life.stock, life.ours):
        assert len(half.runner.requests[req_id].output_token_ids) == kept + 1
    # The step before the cut arrives: none of it is taken for the newest token.
    for one in life.in_flight[0][2]:
        one.complete()
    life.ours.batch.readiness.begin_step()
    assert life.ours.batch.readiness.history.unsettled(life.ours.batch.req_id_to_index[req_id])
    known = life.settled()[req_id]
    assert len(known) == kept + 1
    assert counts_of(life, req_id) == tally(known)


def accepted(life: Life, req_id: str) -> int:
    """How many drafts of a request the step in flight has accepted."""
    _, output, copies = life.in_flight[-1]
    row = copies[0].source[output.req_id_to_index[req_id]]
    return int((row >= 0).sum()) - 1


@pytest.mark.parametrize("kept", range(6))
def test_5_cut_with_drafts_in_flight(kept: int) -> None:
    """As many of the accepted drafts stay as there is place for, as with upstream."""
    life = Life(drafts=3)
    # Drafts are of few tokens: what makes those likely gets drafts accepted.
    req_id = life.add([1, 2, 3], max_tokens=60, frequency_penalty=-0.5)
    life.add([4, 5], max_tokens=60, **PENALTY)
    life.run(2)
    while not accepted(life, req_id) > 1:
        life.step()
    life.faithful = False
    known = life.scheduler.requests[req_id].num_output_tokens
    scheduled = life.scheduler.schedule()
    cached = scheduled.scheduled_cached_reqs
    cached.num_output_tokens[cached.req_ids.index(req_id)] = known + kept - 2
    life._run(scheduled)
    life.ours.batch.readiness.history.settle_older("test")
    theirs, ours = (
        half.runner.requests[req_id].output_token_ids for half in (life.stock, life.ours)
    )
    assert ours == theirs


@pytest.mark.parametrize("asynchronous", [True, False])
def test_6_a_sessions_output_becomes_its_prompt(asynchronous: bool) -> None:
    life = Life(asynchronous=asynchronous)
    life.add([1, 2, 3], req_id="session", resumable=True, max_tokens=4, **PENALTY)
    other = life.add([5], max_tokens=30, **PENALTY)
    life.run(8)
    assert "session" not in life.ours.batch.req_ids
    life.faithful = False  # the scheduler's output starts anew
    life.add([8, 9], req_id="session", resumable=True, max_tokens=4, **PENALTY)
    life.step()
    life.step()
    row = life.ours.batch.req_id_to_index["session"]
    prompt = life.ours.batch.token_ids_cpu[row, : life.ours.batch.num_prompt_tokens[row]]
    assert len(prompt) > 5
    flagged = (slot_of(life, "session") < 0).nonzero().flatten().tolist()
    assert flagged == sorted(set(prompt.tolist()))
    assert sum(counts_of(life, "session").values()) <= 2
    life.abort("session")
    life.abort(other)
    life.finish()


def test_7_a_penalised_request_joins_others_with_unread_placeholders() -> None:
    """Nothing waits, before it joins or after; upstream forgets what the others have."""
    life = Life()
    others = [life.add([n], max_tokens=40) for n in range(3)]
    life.run(6)
    late = life.add([1, 2], **PENALTY)
    life.run(6)
    assert life.ours.waits == 0
    assert life.stock.waits > 3
    settled = life.settled()
    for req_id in (*others, late):
        assert settled[req_id] == life.truth(req_id)
    # What makes upstream's min_tokens last too long for the others.
    theirs = life.stock.batch.req_output_token_ids[0]
    assert theirs is not None
    assert len(theirs) < len(settled[others[0]])


@pytest.mark.parametrize(
    ("more", "owner"),
    [
        ({"bad_words": [[0], [1, 2], [3, 4, 5]]}, None),
        ({"bad_words": [[0], [1, 2], [-1]]}, "bad-words"),  # upstream's to read
        ({"min_tokens": 6, "stop_token_ids": list(range(20))}, None),
        ({"logit_bias": {3: 4.0, 5: -4.0}}, None),
    ],
)
def test_7_penalties_mixed_with(more: dict[str, Any], owner: str | None) -> None:
    """A fence belongs to who needs it on the host, and to no one else."""
    before = dict(fences.counts())
    life = Life()
    life.add([1, 2, 3], **PENALTY, **copy.deepcopy(more))
    life.add([4, 5], **PENALTY)
    life.finish()
    added = {name: n - before.get(name, 0) for name, n in fences.counts().items()}
    assert {name for name, n in added.items() if n} == ({owner} if owner else set())


def test_7_penalties_mixed_with_a_users_processor() -> None:
    before = fences.counts().get("logits-processors", 0)
    life = Life(processor="user")
    life.add([1, 2, 3], **PENALTY)
    life.add([4, 5])
    life.finish()
    assert fences.counts()["logits-processors"] - before > 5


def test_7_penalties_mixed_with_structured_output() -> None:
    life = Life()
    life.structured = {life.add([1, 2, 3], **PENALTY)}
    other = life.add([4, 5], **PENALTY)
    life.run(8)
    assert life.ours.waits == 0
    settled = life.settled()
    assert all(token % 2 == 0 for req_id in life.structured for token in settled[req_id])
    assert any(token % 2 for token in settled[other])


@pytest.mark.parametrize("asynchronous", [True, False])
def test_8_several_tokens_a_step(asynchronous: bool) -> None:
    """Accepted and rejected drafts, and penalties of drafts within the step."""
    life = Life(asynchronous=asynchronous, drafts=3)
    req_ids = [life.add([n, 1], max_tokens=30, **PENALTY) for n in range(3)]
    req_ids.append(life.add([9], max_tokens=30))
    for _ in range(10):
        life.step()
        for req_id in req_ids[:3]:
            if req_id in life.ours.batch.req_id_to_index:
                assert counts_of(life, req_id) == tally(life.truth(req_id))
    assert 0 < life.accepted < life.drafted
    assert life.ours.waits == 0
    assert not asynchronous or life.stock.waits > 5
    life.finish()


def test_8_the_minimum_of_tokens_is_counted_as_upstream_counts_it() -> None:
    """With drafts in flight a length is a guess, which upstream does not make here."""
    before = fences.counts().get("min-tokens", 0)
    life = Life(drafts=2)
    life.add([1, 2], min_tokens=9, stop_token_ids=[0, 1, 2, 3], **PENALTY)
    life.finish()
    assert fences.counts()["min-tokens"] > before


def test_8_a_step_without_drafts_after_one_with() -> None:
    """Where its tokens go depends on how many drafts are accepted before it."""
    life = Life(drafts=2)
    req_ids = [life.add([n, 1], max_tokens=40, frequency_penalty=-0.5) for n in range(3)]
    widths = set()
    for number in range(12):
        if number % 3 == 0:
            life.drop_drafts()
        life.step()
        widths.add(life.ours.last.source.shape[1] if life.ours.last else 0)
    assert widths == {1, 3}
    settled = life.settled()
    for req_id in req_ids:
        known = settled[req_id]
        assert known == life.truth(req_id)[: len(known)]
    life.finish()


def test_8_rejected_drafts_are_no_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine reads a step before it schedules the next: the runner then trims outputs."""
    life = Life(drafts=2)
    for n in range(3):
        life.add([n, 1], max_tokens=40, **PENALTY)
    life.run(2)
    counted: list[int] = []
    penalties = life.ours.batch.readiness.penalties
    monkeypatch.setattr(penalties, "_build_slot", counted.append)
    for _ in range(10):
        life.step(read_first=True)
    assert life.accepted < life.drafted
    assert counted == []
    assert life.ours.waits == 0


def test_8_the_minimum_of_tokens_beside_bad_words() -> None:
    """Upstream keeps every list where one request has bad words, though it has no penalty."""
    life = Life(drafts=2, max_tokens_a_step=12)
    life.add([1, 2], min_tokens=12, max_tokens=30, stop_token_ids=[0, 1, 2])
    life.add([3, 4] * 44, max_tokens=4, bad_words=[[0, 1]])
    life.faithful = False
    life.finish()
    assert life.drafted


def both_batches(specs: list[Spec], vocab: int = VOCABULARY) -> tuple[Any, Any]:
    """A batch of upstream's, and ours with its slots filled."""
    stock = empty(modules.pristine, vocab)
    fill(stock, specs)
    ours = empty(modules.overlaid, vocab)
    fill(ours, specs)
    return stock, ours


def compare(stock: Any, ours: Any, logits: torch.Tensor) -> None:
    """Apply the penalties to the same logits on both sides."""
    ours.readiness.begin_step()
    ours.readiness.prepare(logits, None)
    penalties = Penalties.take(ours.sampling_metadata, logits)[0]
    assert penalties is not None
    # Upstream's form depends on the layout, which a clone keeps.
    mine = torch.empty_strided(logits.shape, logits.stride()).copy_(logits)
    penalties.apply(mine, after_drafts=False)
    expected = stock_penalties(stock, logits)
    assert same_bits(mine, expected)


def test_9_a_prompt_of_embeddings_without_ids() -> None:
    """Upstream counts what the row holds, whatever that is; so must we."""
    embeds = torch.zeros(4, 8)
    specs = [Spec(None, [5, 6], PENALTY, embeds), Spec([1, 2], [3], PENALTY)]
    stock, ours = both_batches(specs)
    compare(stock, ours, torch.randn(2, VOCABULARY))


def test_9_an_id_that_is_the_vocabulary_size() -> None:
    """Upstream pads with it, so that it counts for nothing."""
    specs = [Spec([1, VOCABULARY], [VOCABULARY, 3], PENALTY), Spec([2], [], {})]
    stock, ours = both_batches(specs)
    compare(stock, ours, torch.randn(2, VOCABULARY))


def test_9_an_id_above_the_vocabulary_counts_for_nothing() -> None:
    """Upstream's scatter fails on it, on a GPU with the end of the engine."""
    specs = [Spec([1, VOCABULARY + 9], [VOCABULARY + 1, 3], PENALTY)]
    stock, ours = both_batches(specs)
    logits = torch.randn(1, VOCABULARY)
    with pytest.raises(RuntimeError, match="out of bounds"):
        stock_penalties(stock, logits.clone())
    sane = empty(modules.pristine, VOCABULARY)
    fill(sane, [Spec([1], [3], PENALTY)])
    compare(sane, ours, logits)


@pytest.mark.parametrize("width", [VOCABULARY + 3, VOCABULARY + 64])
def test_9_wider_logits_are_upstreams(width: int) -> None:
    """A vocabulary padded or extended by LoRA: its padding token is one of the logits."""
    specs = [Spec([1, 2], [3, 4], PENALTY), Spec([1], [2], {})]
    stock, ours = both_batches(specs)
    logits = torch.randn(2, width)
    ours.readiness.begin_step()
    ours.readiness.prepare(logits, None)
    assert Penalties.take(ours.sampling_metadata, logits)[0] is None
    sampler = modules.overlaid(modules.SAMPLER).Sampler()
    theirs = modules.pristine(modules.SAMPLER).Sampler()
    mine = sampler.apply_logits_processors(logits.clone(), ours.sampling_metadata, False)
    expected = theirs.apply_logits_processors(logits.clone(), stock.sampling_metadata, False)
    assert same_bits(mine, expected)
    assert not same_bits(mine, logits)


def test_9_a_step_of_wider_logits_is_caught_up_with() -> None:
    """It is upstream's, and what it samples is counted all the same."""
    specs = [Spec([1, 2], [3, 4], PENALTY), Spec([1], [2], {})]
    stock, ours = both_batches(specs)
    nobody = torch.zeros(16, dtype=torch.bool)
    for width, token in ((VOCABULARY, 5), (VOCABULARY + 3, 6), (VOCABULARY + 3, 6)):
        ours.readiness.begin_step()
        ours.readiness.prepare(torch.randn(2, width), None)
        ours.readiness.observe_sampled(torch.tensor([[token], [token]]), nobody)
        for batch in (stock, ours):
            for row, output in enumerate(batch.req_output_token_ids):
                batch.token_ids_cpu[row, batch.num_tokens_no_spec[row]] = token
                batch.num_tokens_no_spec[row] += 1
                output.append(token)
    compare(stock, ours, torch.randn(2, VOCABULARY))


@pytest.mark.parametrize("vocab", [1, 2, 31, 37, 1009, 1021])
@pytest.mark.parametrize("layout", ["contiguous", "columns", "transposed"])
def test_9_vocabularies_and_layouts(vocab: int, layout: str) -> None:
    specs = [Spec([n % vocab], [0, (n * 7) % vocab], PENALTY if n % 2 else {}) for n in range(5)]
    stock, ours = both_batches(specs, vocab)
    logits = torch.randn(5, vocab)
    if layout == "columns":
        logits = torch.randn(5, vocab + 3)[:, :vocab]
    if layout == "transposed":
        logits = torch.randn(vocab, 5).t()
    compare(stock, ours, logits)


def test_10_a_rank_that_does_not_sample_takes_nothing() -> None:
    """It keeps requests with penalties, but is never asked to sample."""
    life = Life()
    half = life.ours
    life.add([1, 2], **PENALTY)
    scheduled = life.scheduler.schedule()
    pipeline = SimpleNamespace(is_last_rank=False, world_size=2)
    module = modules.overlaid(modules.RUNNER)
    first, module.get_pp_group = module.get_pp_group, lambda: pipeline
    try:
        half.runner._update_states(scheduled)
    finally:
        module.get_pp_group = first
    assert half.batch.readiness.penalties._slots == {"r0": None}
    assert not half.batch.readiness.history.in_flight


def test_10_dummy_runs_are_not_the_live_batch() -> None:
    """Their metadata holds lists of its own, which are nobody's rows."""
    ours = empty(modules.overlaid, VOCABULARY)
    fill(ours, [Spec([1], [2], PENALTY)])
    logits = torch.randn(1, VOCABULARY)
    ours.readiness.begin_step()
    ours.readiness.prepare(logits, None)
    metadata = ours.sampling_metadata
    assert Penalties.take(metadata, logits)[0] is not None
    equal = copy.copy(metadata)
    equal.output_token_ids = list(metadata.output_token_ids)
    assert equal.output_token_ids == metadata.output_token_ids
    assert Penalties.take(equal, logits)[0] is None
    other = copy.copy(metadata)
    other.presence_penalties = metadata.presence_penalties.clone()
    assert Penalties.take(other, logits)[0] is None


def test_10_logits_of_another_shape_are_not_the_live_batchs() -> None:
    ours = empty(modules.overlaid, VOCABULARY)
    fill(ours, [Spec([1], [2], PENALTY)] * 2)
    logits = torch.randn(2, VOCABULARY)
    ours.readiness.begin_step()
    ours.readiness.prepare(logits, None)
    metadata = ours.sampling_metadata
    assert Penalties.take(metadata, logits)[0] is not None
    assert Penalties.take(metadata, logits[:1])[0] is None
    assert Penalties.take(metadata, logits[:, :-1])[0] is None


def test_10_upstreams_path_finds_the_lists_settled() -> None:
    """Metadata that somebody changed, over the live rows with a step in flight."""
    life = Life()
    life.add([1, 2], **PENALTY)
    life.run(3)
    batch = life.ours.batch
    assert batch.readiness.history.unsettled(0)
    changed = copy.copy(batch.sampling_metadata)
    changed.presence_penalties = changed.presence_penalties.clone()
    assert Penalties.take(changed, torch.randn(1, VOCABULARY))[0] is None
    assert not batch.readiness.history.unsettled(0)


def test_10_a_batch_of_pooling_requests_has_no_features() -> None:
    batch = modules.overlaid(modules.INPUT_BATCH).InputBatch(
        max_num_reqs=2,
        max_model_len=16,
        max_num_batched_tokens=16,
        device=torch.device("cpu"),
        pin_memory=False,
        vocab_size=VOCABULARY,
        block_sizes=[BLOCK],
        kernel_block_sizes=[BLOCK],
        is_pooling_model=True,
    )
    assert batch.readiness.history is None
    assert batch.readiness.penalties is None


@pytest.mark.parametrize("switch", ["off", "-penalties", "-history"])
def test_switched_off_upstream_serves(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a feature the same lives give the same, with upstream's waits."""
    monkeypatch.setenv("VLLM_READINESS", switch)
    life = Life()
    live = life.ours.batch.readiness
    assert live.penalties is None
    assert (live.history is None) == (switch != "-penalties")
    if live.history is None:
        monkeypatch.setattr(Life, "outputs", lambda self: iter(()))
    life.add([1, 2, 3], **PENALTY)
    life.add([1, 2], max_tokens=20)
    life.finish()
    assert life.ours.waits == life.stock.waits > 5


def test_without_room_upstreams_path_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The third slot finds no room; once a request has left, slots are tried again.

    The allocation is made to fail here; tests/gpu runs out of real memory.
    """
    life = Life()
    penalties = life.ours.batch.readiness.penalties
    no_room_for_a_third(monkeypatch, penalties)
    first, second = (life.add([n, 1], **PENALTY) for n in range(2))
    life.run(2)
    assert penalties.complete
    third = life.add([5], **PENALTY)
    life.step()
    assert not penalties.complete
    assert not any(slot is not None for slot in penalties._slots.values())
    waited = life.ours.waits
    life.run(2)
    assert life.ours.waits == waited + 2
    # A request that leaves makes room.
    life.abort(first)
    life.run(2)
    assert penalties.complete
    assert list(penalties._slots) == [second, third]
    life.finish()


def test_more_requests_than_there_may_be_slots_are_upstreams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_READINESS_SLOTS", "2")
    life = Life()
    penalties = life.ours.batch.readiness.penalties
    first, *_ = (life.add([n, 1], max_tokens=20, **PENALTY) for n in range(3))
    life.run(4)
    assert life.ours.waits == life.stock.waits > 0
    life.abort(first)
    life.run(2)
    assert penalties.complete
    waited = life.ours.waits
    life.finish()
    assert life.ours.waits == waited


def test_the_state_of_a_request_is_its_own() -> None:
    """Two batches, the same names: neither hears of the other."""
    one, two = (empty(modules.overlaid, VOCABULARY) for _ in range(2))
    one.add_request(state(Spec([1], [2], PENALTY), "r0"))
    assert one.readiness.penalties._slots == {"r0": None}
    assert two.readiness.penalties._slots == {}


@pytest.mark.parametrize("seed", range(6))
def test_drafts_that_the_runner_drops_after_they_were_scheduled(seed: int) -> None:
    """A step without drafts, of which the batch still takes it that some were accepted."""
    life = Life(seed, drafts=3, trimmed=True)
    for number in range(4):
        life.add([1, 2, 3, number], max_tokens=18, **PENALTY)
    kinds = set()
    chance = itertools.cycle([True, False, False])
    while life.scheduler.requests:
        life.step(arrives=next(chance))
        steps = life.ours.batch.readiness.history.in_flight
        kinds |= {(step.drafted, step.tokens.shape[1] > 1) for step in steps}
    assert {(True, False), (True, True)} <= kinds


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
