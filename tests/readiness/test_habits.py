"""What no feature may depend on: a copy's arrival, a runner's habits, the garbage collector.

Lives compare ours with upstream's after every step, and with twins of ours whose copies come
early and late; see :class:`support.lives.Life`.
"""

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support import modules
from support.lives import BLOCK, VOCABULARY, Life

PENALTY: dict[str, Any] = {"repetition_penalty": 1.3, "frequency_penalty": 0.4}
#: Words that complete themselves, and what makes their tokens likely.
WORDS: dict[str, Any] = {
    "bad_words": [[0, 1], [1, 1, 0], [1, 1, 1, 1]],
    "logit_bias": {0: 6.0, 1: 6.0},
}


@pytest.mark.parametrize("processor", ["user", "plugin"])
def test_a_processor_reads_every_token_whenever_copies_arrive(processor: str) -> None:
    """One of an entry point reads what stock gives to one that is named at the start."""
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


def test_without_the_fix_an_entry_points_processor_reads_placeholders_for_good() -> None:
    """As on stock, whenever copies arrive."""
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
def test_a_runner_that_samples_by_code_of_its_own(asynchronous: bool, drafts: int) -> None:
    """Steps are served and never counted: the history is counted anew on each."""
    life = Life(asynchronous=asynchronous, drafts=drafts, own="sample_tokens")
    for n in range(3):
        life.add([n, 1], max_tokens=30, **PENALTY, **WORDS)
    life.finish()
    assert not asynchronous or life.ours.waits > 5


@pytest.mark.parametrize("drafts", [0, 2])
def test_what_is_in_flight_is_bounded_where_no_step_is_begun(drafts: int) -> None:
    """A runner that updates its batch by code of its own."""
    life = Life(drafts=drafts, own="_update_states")
    for n in range(3):
        life.add([n, 1], max_tokens=30, **(PENALTY if n else {}))
    history = life.ours.batch.readiness.history
    while life.scheduler.requests:
        life.step()
        assert len(history.in_flight) <= 1
    assert life.steps > 20 or drafts


def test_tails_are_whole_when_odd_words_have_left() -> None:
    """As long as there are some, steps are upstream's, and what they sample is missed."""
    life = Life()
    req_id = life.add([1, 2], max_tokens=40, **WORDS)
    bad_words = life.ours.batch.readiness.bad_words
    for number in range(3):
        life.run(4)
        life.add([3, number], max_tokens=3, bad_words=[[-1]])
        life.run(6)
        assert life.ours.batch.req_ids == [req_id]
        # Its longest word needs as many.
        assert bad_words._slots[req_id].tolist() == life.truth(req_id)[-3:]
    life.finish()


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
    """The runner replaces it when block sizes turn out to be others than it took them for."""
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
    assert all(each() is not None for each in replaced)
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=2 * BLOCK))
    # It imports upstream's.
    kind = modules.overlaid(modules.INPUT_BATCH).InputBatch
    monkeypatch.setattr(modules.overlaid(modules.RUNNER), "InputBatch", kind)
    half.runner.may_reinitialize_input_batch(SimpleNamespace(kv_cache_groups=[group]), [BLOCK])
    assert all(each() is None for each in replaced)
    half.runner.input_batch.readiness.begin_step()


def test_in_a_pipeline_each_history_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests leave for the micro-batch of others, and come back, on each step."""
    life = Life(asynchronous=False, ahead=1)
    counted: list[str] = []
    for slots in life.ours.batch.readiness.slots:

        def count(row: int, slots: Any = slots, whole: Any = slots._build_slot) -> Any:
            counted.append(f"{slots.name} {life.ours.batch.req_ids[row]}")
            return whole(row)

        monkeypatch.setattr(slots, "_build_slot", count)
    left = 0
    for n in range(2):
        life.add([n, 1], max_tokens=30, **PENALTY, **WORDS)
        life.add([n, 2], max_tokens=30, **PENALTY)
        life.step()
    before: set[str] = set()
    while life.scheduler.requests:
        life.step()
        here = set(life.ours.batch.req_ids)
        left += len(before & set(life.scheduler.requests) - here)
        before = here
    assert left > 50
    assert sorted(counted) == [
        *(f"bad-words r{n}" for n in (0, 2)),
        *(f"penalties r{n}" for n in range(4)),
    ]


def test_rejected_drafts_leave_the_same_lists_whenever_copies_arrive() -> None:
    """The engine has read a step; a rank that lags has not, and counts a whole history anew."""
    life = Life(drafts=2, twins=True)
    life.twins[1].reads = False
    life.add([1, 2], max_tokens=30, **PENALTY)
    life.run(4)
    life.step(read_first=True)
    early, late = life.twins
    assert early.batch.req_output_token_ids == late.batch.req_output_token_ids
