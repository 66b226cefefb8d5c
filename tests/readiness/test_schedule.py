"""The features schedule and update-outputs: which requests upstream serves, and what is counted.

That decisions and states are upstream's is tested in tests/lockstep/test_schedulers.py.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support import scheduling
from support.scheduling import FEATURES, Lockstep, Setup
from vllm.v1.readiness.core import bounds, schedule, step, update_outputs
from vllm.v1.readiness.engine import gauges
from vllm.v1.request import RequestStatus

SETUP = Setup(seqs=8, blocks=200, budget=64, length=128)


def usual(asynchronous: bool, **options: Any) -> Setup:
    """Return the usual setup under either schedule."""
    return replace(SETUP, asynchronous=asynchronous, in_flight=1 + asynchronous, **options)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Numbers of requests in all steps: served by each feature, left to upstream, and allocated."""
    counts: Counter[str] = Counter()
    advance, update = schedule.Running._advance_counts, update_outputs.UpdateOutputs._update
    allocate = bounds.Cache.allocate

    def advancing(self: Any, preempted: bool) -> Iterator[Any]:
        for item in advance(self, preempted):
            counts["schedule, left"] += 1
            yield item
        counts["schedule"] += len(self.counts) - len(self.others)

    def updating(self: Any, step: Any, *others: Any) -> Iterator[Any]:
        left = 0
        for item in update(self, step, *others):
            left += 1
            yield item
        counts["update-outputs, left"] += left
        counts["update-outputs"] += len(step.num_scheduled_tokens) - left

    def allocating(self: Any, *others: Any) -> Any:
        counts["allocations"] += 1
        return allocate(self, *others)

    monkeypatch.setattr(schedule.Running, "_advance_counts", advancing)
    monkeypatch.setattr(bounds.Cache, "allocate", allocating)
    monkeypatch.setattr(update_outputs.UpdateOutputs, "_update", updating)
    return counts


def serve(setup: Setup = SETUP, requests: int = 24, **options: Any) -> Lockstep:
    """Serve requests of 40 tokens, which come as others end."""
    lockstep = Lockstep(setup)
    with lockstep.clocked():
        for number in range(requests):
            lockstep.add(8 + number % 5, 40, **options)
            for _ in range(3):
                lockstep.step()
        lockstep.finish()
    return lockstep


@pytest.mark.parametrize("groups", scheduling.GROUPS)
@pytest.mark.parametrize("asynchronous", [True, False])
def test_requests_that_continue_are_served_while_others_come_and_go(
    asynchronous: bool, groups: str, served: Counter[str], fallbacks: dict[tuple[str, str], int]
) -> None:
    serve(usual(asynchronous, caching=groups != "hybrid", groups=groups))
    assert served["schedule, left"] < 0.08 * served["schedule"]
    assert served["update-outputs, left"] < 0.08 * served["update-outputs"]
    assert served["allocations"] < 0.8 * served["schedule"]  # blocks have 4 tokens
    assert fallbacks == {}


def test_the_words_switch_the_features_off(served: Counter[str]) -> None:
    serve(Setup(words=",".join(f"-{word}" for word in FEATURES)))
    assert served == {}
    serve(Setup(words="-schedule"))
    assert served["update-outputs"]
    assert not served["schedule"]
    served.clear()
    serve(Setup(words="-update-outputs"))
    assert served["schedule"]
    assert not served["update-outputs"]


def test_requests_with_a_grammar_are_left_to_upstream(
    served: Counter[str], fallbacks: dict[tuple[str, str], int]
) -> None:
    serve(requests=6, grammar=True)
    assert served["schedule"] == 0
    assert served["update-outputs"] == 5  # in flight as a grammar ended its request
    assert fallbacks == {("schedule", gauges.OTHER_INPUT): 6}


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("drafts", [1, 3])
def test_requests_with_drafts_are_served(
    drafts: int, asynchronous: bool, served: Counter[str], fallbacks: dict[tuple[str, str], int]
) -> None:
    serve(usual(asynchronous, drafts=drafts))
    # A request's first step and its last ones, which might exceed its length.
    assert served["schedule, left"] < 0.3 * served["schedule"]
    assert served["update-outputs, left"] < 0.3 * served["update-outputs"]
    assert fallbacks == {}


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_budget_of_a_step_may_end_within_drafts(
    asynchronous: bool, served: Counter[str]
) -> None:
    # Eight requests have up to 32 tokens.
    serve(usual(asynchronous, drafts=3, budget=18))
    assert served["schedule"]


@pytest.mark.parametrize(
    "setup",
    [
        Setup(drafts=2, groups="full and sliding"),
        Setup(drafts=2, groups="hybrid", caching=False),
        Setup(drafts=5, threshold=5),
    ],
    ids=["window", "hybrid", "threshold"],
)
def test_drafts_beside_windows_states_or_low_thresholds_are_upstreams(
    setup: Setup, served: Counter[str], fallbacks: dict[tuple[str, str], int]
) -> None:
    serve(setup)
    assert served["schedule"] == 0
    assert served["update-outputs"]
    assert fallbacks == {("schedule", gauges.OTHER_INPUT): 1}


@pytest.mark.parametrize("asynchronous", [True, False])
def test_derived_schedulers_are_left_to_upstream(
    asynchronous: bool,
    served: Counter[str],
    fallbacks: dict[tuple[str, str], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    derived = tuple(type("Own", (kind,), {}) for kind in scheduling.classes())
    monkeypatch.setattr(scheduling, "classes", lambda: derived)
    serve(Setup(asynchronous=asynchronous, in_flight=1 + asynchronous))
    assert served == {}
    assert {word: fallbacks[word, gauges.OTHER_CLASS] for word in FEATURES} == dict.fromkeys(
        FEATURES, 1
    )


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        ("scheduler", "connector", object()),
        ("scheduler", "ec_connector", object()),
        ("scheduler", "is_encoder_decoder", True),
        ("scheduler", "enable_return_routed_experts", True),
        ("kv_cache_manager", "coordinator", None),
    ],
)
def test_what_is_not_known_is_left_to_upstream(
    owner: str,
    name: str,
    value: Any,
    fallbacks: dict[tuple[str, str], int],
) -> None:
    scheduler = scheduling.make(SETUP)
    assert step.of(scheduler).running.begin([], {}, {}, {}) is not None
    scheduler = scheduling.make(SETUP)
    changed = scheduler if owner == "scheduler" else getattr(scheduler, owner)
    if name == "coordinator":
        kind = type(changed.coordinator)
        changed.coordinator.__class__ = type("Own", (kind,), {})
    else:
        setattr(changed, name, value)
    assert step.of(scheduler).running.begin([], {}, {}, {}) is None
    assert fallbacks == {("schedule", gauges.OTHER_INPUT): 1}


@pytest.mark.parametrize("asynchronous", [0, 1])
def test_a_scheduler_without_attributes_is_left_to_upstream(asynchronous: int) -> None:
    bare = object.__new__(scheduling.classes()[asynchronous])
    own = step.of(bare)
    assert own.running.begin([], {}, {}, {}) is None
    scheduled: Any = SimpleNamespace(num_scheduled_tokens={"r": 1})
    assert [*own.running.advance_counts(scheduled)] == [("r", 1)]
    assert [*own.running.placeholders_to_add(scheduled)] == ["r"]
    result: Any = SimpleNamespace(sampled_token_ids=[[1]])
    assert [*own.update_outputs.serve(scheduled, result, {})] == [("r", 1)]


@pytest.mark.parametrize("status", [RequestStatus.PREEMPTED, RequestStatus.FINISHED_ABORTED])
def test_a_request_whose_status_another_program_has_changed_is_left_to_upstream(
    status: RequestStatus,
) -> None:
    lockstep = Lockstep(SETUP)
    with lockstep.clocked():
        for _ in range(3):
            lockstep.add(8, 30)
        while len(lockstep.queue) != 1 or lockstep.steps < 8:
            lockstep.step()
        for side in lockstep.sides:
            side.running[0].status = status
        lockstep.process()
