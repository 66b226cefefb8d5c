"""Slots of penalties and bad words: when they serve a step, and when upstream does.

A :class:`support.lockstep.LockstepRun` runs beside upstream and compares the logits of every step.
"""

import copy
import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import launches, modules
from support.batches import Spec, empty, fill, state
from support.lockstep import VOCABULARY, LockstepRun, fail_third_slot
from vllm.v1.readiness.engine import gauges
from vllm.v1.readiness.sample.bad_words import BadWords
from vllm.v1.readiness.sample.penalties import Penalties
from vllm.v1.readiness.sample.slots import Slots

PENALTY: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.4,
    "presence_penalty": -0.6,
}
WORDS: dict[str, Any] = {"bad_words": [[0], [1, 2], [3, 4, 5]]}
#: Each kind of slots, and a request that uses it.
EACH = pytest.mark.parametrize(("kind", "params"), [(Penalties, PENALTY), (BadWords, WORDS)])


def slots_of(lockstep: LockstepRun, kind: type[Slots]) -> Any:
    return live_slots(lockstep.ours.batch.readiness, kind)


def live_slots(live: Any, kind: type[Slots]) -> Any:
    return next(slots for slots in live.slots if type(slots) is kind)


def complete(slots: Any) -> bool:
    """Return whether every request that needs a slot has one."""
    return all(slot is not None for slot in slots._slots.values())


def held(slots: Any) -> dict[str, int]:
    return {metric: value for metric, _, value in slots.held()}


@EACH
@pytest.mark.parametrize("drafts", [0, 3])
def test_nothing_waits(kind: type[Slots], params: dict[str, Any], drafts: int) -> None:
    lockstep = LockstepRun(5, drafts=drafts)
    for n in range(3):
        lockstep.add([n, 1], max_tokens=20, **params)
    lockstep.add([9], max_tokens=20)
    lockstep.run(8)
    assert complete(slots_of(lockstep, kind))
    lockstep.finish()
    assert lockstep.ours.waits == 0
    assert lockstep.stock.waits > 5


@EACH
def test_without_room_upstream_serves(
    kind: type[Slots],
    params: dict[str, Any],
    fallbacks: dict[tuple[str, str], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The third slot finds no room; once a request has left, slots are built again.

    The allocation is made to fail here; tests/gpu runs out of real memory.
    """
    lockstep = LockstepRun()
    slots = slots_of(lockstep, kind)
    fail_third_slot(monkeypatch, slots)
    first, second = (lockstep.add([n, 1], **params) for n in range(2))
    lockstep.run(2)
    assert complete(slots)
    third = lockstep.add([5], **params)
    lockstep.step()
    assert not any(slot is not None for slot in slots._slots.values())
    waited = lockstep.ours.waits
    lockstep.run(2)
    assert lockstep.ours.waits == waited + 2
    assert fallbacks == {(kind.name, gauges.NO_ROOM): 3}
    lockstep.abort(first)
    lockstep.run(2)
    assert complete(slots)
    assert list(slots._slots) == [second, third]
    lockstep.finish()


@EACH
def test_more_requests_than_slots_are_upstreams(
    kind: type[Slots],
    params: dict[str, Any],
    fallbacks: dict[tuple[str, str], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_READINESS_SLOTS", "2")
    lockstep = LockstepRun()
    first, *_ = (lockstep.add([n, 1], max_tokens=20, **params) for n in range(3))
    lockstep.run(4)
    assert lockstep.ours.waits == lockstep.stock.waits > 0
    assert fallbacks == {(kind.name, gauges.NO_SLOT): 4}
    assert held(slots_of(lockstep, kind))[gauges.SLOTS] == 0
    lockstep.abort(first)
    lockstep.run(2)
    assert fallbacks == {(kind.name, gauges.NO_SLOT): 4}
    assert held(slots_of(lockstep, kind))[gauges.SLOTS] == 2
    assert held(slots_of(lockstep, kind))[gauges.SLOT_BYTES] > 0
    assert complete(slots_of(lockstep, kind))
    waited = lockstep.ours.waits
    lockstep.finish()
    assert lockstep.ours.waits == waited


@pytest.mark.parametrize("switch", ["off", "-penalties,-bad-words", "-history"])
@pytest.mark.parametrize("params", [PENALTY, WORDS])
def test_switched_off_upstream_serves(params: dict[str, Any], switch: str) -> None:
    lockstep = LockstepRun(switch=switch)
    live = lockstep.ours.batch.readiness
    assert live.slots == []
    assert (live.history is None) == (switch in ("off", "-history"))
    lockstep.add([1, 2, 3], **params)
    lockstep.add([1, 2], max_tokens=20)
    lockstep.finish()
    assert lockstep.ours.waits == lockstep.stock.waits > 5


def changed(field: str, value: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that copies metadata and changes one field."""

    def change(metadata: Any) -> Any:
        other = copy.copy(metadata)
        setattr(other, field, value(getattr(metadata, field)))
        return other

    return change


@pytest.mark.parametrize(
    ("kind", "params", "change"),
    [
        *(
            (kind, params, changed("output_token_ids", list))
            for kind, params in ((Penalties, PENALTY), (BadWords, WORDS))
        ),
        *(
            (Penalties, PENALTY, changed(f"{name}_penalties", torch.clone))
            for name in ("repetition", "frequency", "presence")
        ),
        (BadWords, WORDS, changed("bad_words_token_ids", dict)),
        (BadWords, WORDS, changed("bad_words_token_ids", lambda _: {})),
    ],
)
def test_only_the_live_batchs_metadata_and_logits_are_recognised(
    kind: type[Slots], params: dict[str, Any], change: Callable[[Any], Any]
) -> None:
    """A dummy run's metadata may be equal, and describes other rows."""
    batch = empty(modules.overlaid, VOCABULARY)
    fill(batch, [Spec([1], [2], params)] * 2)
    logits = torch.randn(2, VOCABULARY)
    batch.readiness.history.begin_step()
    batch.readiness.begin_sampling(logits, None)
    metadata = batch.sampling_metadata
    assert kind.take(metadata, logits)[0] is live_slots(batch.readiness, kind)
    assert kind.take(change(metadata), logits)[0] is None
    assert kind.take(metadata, logits[:1])[0] is None
    assert kind.take(metadata, logits[:, :-1])[0] is None


@pytest.mark.parametrize(
    ("kind", "params", "change"),
    [
        (Penalties, PENALTY, changed("presence_penalties", torch.clone)),
        (BadWords, WORDS, changed("bad_words_token_ids", lambda _: {0: [[5]]})),
    ],
)
def test_upstreams_code_finds_the_lists_settled(
    kind: type[Slots], params: dict[str, Any], change: Callable[[Any], Any]
) -> None:
    """Metadata that somebody has changed, of the live rows, with a step in flight."""
    lockstep = LockstepRun()
    lockstep.add([1, 2], **params)
    lockstep.run(3)
    batch = lockstep.ours.batch
    assert batch.readiness.history.unsettled(0)
    assert kind.take(change(batch.sampling_metadata), torch.randn(1, VOCABULARY))[0] is None
    assert not batch.readiness.history.unsettled(0)


@EACH
def test_a_reason_is_forgotten_once_slots_serve(
    kind: type[Slots], params: dict[str, Any], fallbacks: dict[tuple[str, str], int]
) -> None:
    """A step found no memory, and was never observed; a later one does not begin its sampling."""
    lockstep = LockstepRun()
    lockstep.add([1, 2], **params)
    lockstep.run(3)
    slots_of(lockstep, kind).leave_step(gauges.NO_ROOM)
    lockstep.run(1)
    batch = lockstep.ours.batch
    assert kind.take(batch.sampling_metadata, torch.randn(1, VOCABULARY))[0] is None
    assert fallbacks == {(kind.name, gauges.OTHER_CLASS): 1}


def test_a_rank_that_does_not_sample_builds_no_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps the requests, but is never asked to sample."""
    lockstep = LockstepRun()
    lockstep.add([1, 2], **PENALTY, **WORDS)
    pipeline = SimpleNamespace(is_last_rank=False, world_size=2)
    monkeypatch.setattr(modules.overlaid(modules.RUNNER), "get_pp_group", lambda: pipeline)
    lockstep.ours.runner._update_states(lockstep.scheduler.schedule())
    live = lockstep.ours.batch.readiness
    assert [slots._slots for slots in live.slots] == [{"r0": None}] * 2
    assert not live.history.in_flight


def built(lockstep: LockstepRun, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the name of each slot is added that is built from a history."""
    names: list[str] = []
    for slots in lockstep.ours.batch.readiness.slots:

        def build(rows: list[int], slots: Any = slots, whole: Any = slots.build) -> Any:
            req_ids = lockstep.ours.batch.req_ids
            names.extend(f"{slots.name} {req_ids[row]}" for row in rows)
            return whole(rows)

        monkeypatch.setattr(slots, "build", build)
    return names


def test_in_a_pipeline_each_slot_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests leave for the micro-batch of others, and come back, on each step."""
    lockstep = LockstepRun(asynchronous=False, ahead=1)
    names = built(lockstep, monkeypatch)
    for n in range(2):
        lockstep.add([n, 1], max_tokens=30, **PENALTY, **WORDS)
        lockstep.add([n, 2], max_tokens=30, **PENALTY)
        lockstep.step()
    left = 0
    before: set[str] = set()
    while lockstep.scheduler.requests:
        lockstep.step()
        here = set(lockstep.ours.batch.req_ids)
        left += len(before & set(lockstep.scheduler.requests) - here)
        before = here
    assert left > 50
    assert sorted(names) == [
        *(f"bad-words r{n}" for n in (0, 2)),
        *(f"penalties r{n}" for n in range(4)),
    ]


def left_by(kind: type[Slots], params: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return a batch, its slots and the request that has left it, which has kept its slot."""
    batch = empty(modules.overlaid, VOCABULARY)
    fill(batch, [Spec([1], [2], {})])
    request = state(Spec([1, 2], [3], params), "left")
    batch.add_request(request)
    batch.refresh_metadata()
    slots = live_slots(batch.readiness, kind)
    prepare(batch)
    discarded = torch.ones(16, dtype=torch.bool)
    batch.readiness.observe_sampled(torch.zeros(2, 1, dtype=torch.int32), discarded)
    batch.remove_request("left")
    batch.condense()
    assert list(slots._kept) == ["left"]
    assert not slots._slots
    return batch, slots, request


def prepare(batch: Any) -> None:
    batch.readiness.history.begin_step()
    batch.readiness.begin_sampling(torch.randn(batch.num_reqs, VOCABULARY), None)


@EACH
@pytest.mark.parametrize("change", ["nothing", "a token", "parameters"])
def test_a_request_finds_its_slot_if_it_returns_unchanged(
    kind: type[Slots], params: dict[str, Any], change: str
) -> None:
    batch, slots, request = left_by(kind, params)
    kept = slots._kept["left"]
    if change == "a token":
        request.output_token_ids.append(5)
    if change == "parameters":
        request.sampling_params = copy.copy(request.sampling_params)
    batch.add_request(request)
    assert slots._slots["left"] is (kept if change == "nothing" else None)
    assert not slots._kept


@EACH
def test_kept_slots_make_room_for_others(
    kind: type[Slots], params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, slots, request = left_by(kind, params)
    kept, build = slots._kept["left"], slots.build

    def build_in_free_memory(rows: list[int]) -> Any:
        if kept.tensor is not None:
            raise torch.OutOfMemoryError
        return build(rows)

    monkeypatch.setattr(slots, "build", build_in_free_memory)
    batch.add_request(state(Spec([1], [2], params), "other"))
    batch.refresh_metadata()
    prepare(batch)
    assert slots.serving
    assert slots._slots["other"] is not None
    batch.add_request(request)
    assert slots._slots["left"] is None


@EACH
def test_slots_miss_the_samples_of_a_step_that_was_not_prepared(
    kind: type[Slots], params: dict[str, Any]
) -> None:
    batch = empty(modules.overlaid, VOCABULARY)
    fill(batch, [Spec([1], [2], params)])
    live = batch.readiness
    live.history.begin_step()
    live.begin_sampling(torch.randn(1, VOCABULARY), None)
    slots: Any = live_slots(live, kind)
    for whole in (True, False):
        live.observe_sampled(torch.tensor([[3]]), torch.zeros(1, dtype=torch.bool))
        assert complete(slots) is whole


def test_rejected_drafts_are_no_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine reads a step before it schedules the next: the runner then trims outputs."""
    lockstep = LockstepRun(drafts=2)
    for n in range(3):
        lockstep.add([n, 1], max_tokens=40, **PENALTY)
    lockstep.run(2)
    names = built(lockstep, monkeypatch)
    for _ in range(10):
        lockstep.step(read_first=True)
    assert lockstep.accepted < lockstep.drafted
    assert names == []
    assert lockstep.ours.waits == 0


@pytest.mark.parametrize(("name", "kind"), [("penalties", "Penalties"), ("bad_words", "BadWords")])
def test_warm_up_launches_the_variants_of_serving(name: str, kind: str) -> None:
    """Triton classifies the arguments for batches of every size as in the warm-up."""
    path = f"vllm.v1.readiness.sample.{name}"
    batch = LockstepRun(max_num_seqs=16).ours.batch
    with launches.recorded(path, "vllm.v1.readiness.kernels.drafts") as seen:
        slots = getattr(importlib.import_module(path), kind)(batch, batch.readiness.history)
        slots.kernels = True
        slots.warm_up()
        warmed = set(seen)
        for count in (1, 2, 16):
            slots.addresses = torch.zeros(count, dtype=torch.int64)
            slots.values = [torch.zeros(count)] * len(slots.fields)
            slots.apply(torch.zeros(count, batch.vocab_size), None, per_draft=False)
            slots.serving = True
            sampled = torch.zeros((count, 1), dtype=torch.int32)
            slots.observe_sampled(sampled, torch.zeros(count, dtype=torch.bool))
    assert len(warmed) > 2
    assert seen == warmed
