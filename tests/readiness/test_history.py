"""The history on the host: who waits for it, and when it is settled.

Lockstep runs compare ours to upstream's after every step, and with twins of ours whose copies come
early and late; see :class:`support.lockstep.LockstepRun`. More cuts, preemption, sessions and
pipelines are drawn in test_lockstep.
"""

import copy
import gc
import weakref
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import modules, processors
from support.batches import Spec, empty, state
from support.lockstep import BLOCK, VOCABULARY, LockstepRun
from vllm.v1.readiness.engine import fences

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
        ({"processor": "older"}, {}, None),
        ({"processor": "none"}, {}, None),
        # With drafts in flight a length is a guess, which upstream does not make here.
        ({"drafts": 2}, {"min_tokens": 9, "stop_token_ids": STOP[:4]}, "min-tokens"),
    ],
)
def test_a_fence_belongs_to_the_reader_that_needs_it(
    named: dict[str, Any], params: dict[str, Any], owner: str | None
) -> None:
    before = dict(fences.counts())
    lockstep = LockstepRun(**named)
    lockstep.add([1, 2, 3], **PENALTY, **params)
    lockstep.add([4, 5], **PENALTY)
    lockstep.finish()
    added = {name for name, n in fences.counts().items() if n > before.get(name, 0)}
    assert added == ({owner} if owner else set())


def test_a_penalised_request_joins_others_without_a_wait() -> None:
    """Upstream waits, and forgets the tokens that the others have."""
    lockstep = LockstepRun()
    others = [lockstep.add([n], max_tokens=40) for n in range(3)]
    lockstep.run(6)
    late = lockstep.add([1, 2], **PENALTY)
    lockstep.structured = {late}
    lockstep.run(6)
    assert lockstep.ours.waits == 0
    assert lockstep.stock.waits > 3
    settled = lockstep.settled()
    assert settled == {req_id: lockstep.truth(req_id) for req_id in (*others, late)}
    assert all(token % 2 == 0 for token in settled[late])
    assert any(token % 2 for token in settled[others[0]])


def test_a_processor_must_say_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors.OlderSpy, "readiness_reads", "oldest")
    with pytest.raises(
        ValueError, match=r"OlderSpy\.readiness_reads is 'oldest'\. Set it to 'newest'"
    ):
        LockstepRun(processor="older")
    LockstepRun(processor="older", switch="off")


def test_without_the_fix_a_plugin_processor_reads_stocks_placeholders() -> None:
    lockstep = LockstepRun(processor="plugin", switch="-plugin-processors", twins=True)
    lockstep.add([1, 2], max_tokens=12)
    for number in range(8):
        lockstep.step()
        for runner in lockstep.runners:
            assert runner.spy is not None
            assert runner.spy.seen[-1] == {0: [-1] * number}
    lockstep.finish()


@pytest.mark.parametrize("drafts", [0, 2])
def test_steps_in_flight_are_bounded_where_none_is_begun(drafts: int) -> None:
    """A runner that updates its batch by code of its own."""
    lockstep = LockstepRun(drafts=drafts, own="_update_states")
    for n in range(3):
        lockstep.add([n, 1], max_tokens=30, **(PENALTY if n else {}))
    history = lockstep.ours.batch.readiness.history
    while lockstep.scheduler.requests:
        lockstep.step()
        assert len(history.in_flight) <= 1
    assert lockstep.steps > 20 or drafts


@pytest.mark.parametrize("settled", [True, False])
@pytest.mark.parametrize("computed", [0, 2, 3])
def test_a_request_cut_back_behind_its_sampled_tokens_stops(computed: int, settled: bool) -> None:
    """As the scheduler leaves one whose KV load has failed; stock embeds a placeholder."""
    lockstep = LockstepRun()
    lockstep.add([4, 5])
    req_id = lockstep.add([1, 2, 3])
    lockstep.run(3)
    scheduled = lockstep.scheduler.schedule()
    cached = scheduled.scheduled_cached_reqs
    row = cached.req_ids.index(req_id)
    scheduled.num_scheduled_tokens[req_id] += cached.num_computed_tokens[row] - computed
    cached.num_computed_tokens[row] = computed
    scheduled.total_num_scheduled_tokens = sum(scheduled.num_scheduled_tokens.values())
    prepared = []
    for participant in (lockstep.stock, lockstep.ours):
        runner = participant.runner
        runner._update_states(copy.deepcopy(scheduled))
        if settled and participant is lockstep.ours:
            participant.batch.readiness.history.settle_now("test")
        names = participant.batch.req_ids
        counts = np.array([scheduled.num_scheduled_tokens[name] for name in names], np.int32)
        prepared.append(partial(runner._prepare_inputs, scheduled, counts))
    prepared[0]()
    ids = lockstep.stock.runner.input_ids.gpu[: scheduled.total_num_scheduled_tokens]
    assert -1 in ids.tolist()
    with pytest.raises(IndexError, match=f"request {req_id} .* token 3.*failed-loads"):
        prepared[1]()


def test_a_step_is_not_waited_for_once_its_requests_have_left() -> None:
    """A pipeline of three: each micro-batch has left before the next one begins."""
    never = SimpleNamespace(query=lambda: False)  # the event of a copy that cannot be waited for
    batch = empty(modules.overlaid, VOCABULARY)
    live = batch.readiness
    for name in "abcd":
        live.history.begin_step()
        for req_id in list(batch.req_ids):
            batch.remove_request(req_id)
        batch.add_request(state(Spec([1], [], {}), name))
        batch.refresh_metadata()
        live.begin_sampling(torch.zeros(1, VOCABULARY), None)
        batch.prev_req_id_to_index = {name: 0}
        live.history.place(256)
        live.history.expect(torch.tensor([[7]], dtype=torch.int32), never)
    assert len(live.history.in_flight) <= 2


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
    lockstep = LockstepRun(processor=processor, markers=([36], [35]))
    lockstep.add([1, 2], thinking_token_budget=3, **PENALTY, **WORDS)
    lockstep.run(3)
    runner = lockstep.ours
    vars(runner.runner).update(
        max_encoder_len=0,
        max_num_reqs=lockstep.max_num_seqs,
        max_num_tokens=lockstep.max_tokens_a_step,
        pin_memory=False,
        model_config=SimpleNamespace(get_vocab_size=lambda: VOCABULARY),
        vllm_config=SimpleNamespace(reasoning_config=lockstep.reasoning),
        _init_block_sizes=[BLOCK],
        _init_kernel_block_sizes=[BLOCK],
    )
    replaced = [weakref.ref(each) for each in (runner.batch, runner.batch.readiness)]
    del runner.batch
    assert all(reference() is not None for reference in replaced)
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=2 * BLOCK))
    # It imports upstream's.
    kind = modules.overlaid(modules.INPUT_BATCH).InputBatch
    monkeypatch.setattr(modules.overlaid(modules.RUNNER), "InputBatch", kind)
    runner.runner.may_reinitialize_input_batch(SimpleNamespace(kv_cache_groups=[group]), [BLOCK])
    assert all(reference() is None for reference in replaced)
    runner.runner.input_batch.readiness.history.begin_step()
