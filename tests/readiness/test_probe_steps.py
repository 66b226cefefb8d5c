"""Counts of the probe for steps of stand-ins with upstream's methods."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from readiness.metrics import counts, shown
from readiness.stand_ins import StandIns, scheduled, together
from vllm.v1.readiness.engine import fences, gauges
from vllm.v1.readiness.watch.probe import events, methods


class Clock:
    """The host's clock, which goes on by one millisecond when it is read."""

    def __init__(self) -> None:
        self.now = 10**12

    def __call__(self) -> int:
        self.now += 1_000_000
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(methods, "now", clock)
    return clock


def test_parts_of_steps_are_counted_with_their_times(stand_ins: StandIns, clock: Clock) -> None:
    """An output after a pause, with no cached request, ends no interval."""
    for continuing in (1, 2, 0, 3):
        scheduler_output = scheduled(continuing=continuing)
        assert stand_ins.runner.execute_model(scheduler_output) == ("executed", False)
        clock.now += 5_000_000
        assert stand_ins.runner.sample_tokens("sampled") == "sampled"
    assert counts() == {
        ("execute_model", "rank0", ""): 4,
        ("sample_tokens", "rank0", ""): 4,
        ("output_interval", "rank0", ""): 2,
    }
    page = shown()
    assert page["execute_model_seconds_sum", "rank0", "", ""] == 0.004
    assert page["execute_model_seconds_bucket", "rank0", "", "0.0005"] == 0
    assert page["execute_model_seconds_bucket", "rank0", "", "0.001"] == 4
    assert page["output_interval_seconds_sum", "rank0", "", ""] == pytest.approx(0.018)


def test_an_exception_is_passed_on_and_its_part_counted(stand_ins: StandIns) -> None:
    wrong = ValueError("wrong")
    calls: list[Callable[[], Any]] = [
        lambda: stand_ins.runner.execute_model(scheduled(result=wrong)),
        lambda: stand_ins.runner.sample_tokens(wrong),
        lambda: stand_ins.scheduler.update_from_output(wrong, None),
        lambda: stand_ins.output(wrong).get_output(),
    ]
    stand_ins.scheduler.schedule()
    for call in calls:
        with pytest.raises(ValueError, match="wrong") as caught:
            call()
        assert caught.value is wrong
    assert counts() == {
        ("schedule", "engine0", ""): 1,
        ("update_from_output", "engine0", ""): 1,
        ("execute_model", "rank0", ""): 1,
        ("sample_tokens", "rank0", ""): 1,
        ("get_output", "rank0", ""): 1,
        ("fence", "rank0", "get_output"): 1,
    }


def test_an_output_is_delivered_once_and_later_than_newer_steps(stand_ins: StandIns) -> None:
    """Synchronous runner V2 takes it within sample_tokens; a pipeline's middle rank has none."""
    late: list[Any] = []
    for continuing in (4, 0, 6):
        late.append(stand_ins.step(lambda: stand_ins.output("tokens"), continuing))
        if len(late) > 1:
            together(late[-2].get_output)
    assert ("output_interval", "rank0", "") not in counts()  # of the second step, after a pause
    late[-1].get_output()
    for sampled in (lambda: stand_ins.output("tokens").get_output(), None, "tokens"):
        stand_ins.step(sampled)
    assert counts()["output_interval", "rank0", ""] == 3


@pytest.mark.parametrize(
    ("parallel", "worker", "core"),
    [
        ({}, "rank0", "engine0"),
        ({"rank": 3}, "rank3", "engine0"),
        ({"rank": 1, "data_parallel_size": 2}, "dp0-rank1", "engine0"),
        # Replicas that know nothing of each other: the size is 1.
        ({"data_parallel_index": 1}, "dp1-rank0", "engine1"),
    ],
)
def test_processes_are_named_by_rank_and_replica(
    stand_ins: StandIns, parallel: dict[str, int], worker: str, core: str
) -> None:
    stand_ins = StandIns(**parallel)
    stand_ins.scheduler.schedule()
    stand_ins.step()
    assert {process for _, process, _ in counts()} == {worker, core}


def test_tokens_are_counted(stand_ins: StandIns) -> None:
    stand_ins.scheduler.schedule()
    for tokens in ([[5], [], [7, 8]], [[9]], None):
        output = SimpleNamespace(sampled_token_ids=tokens)
        assert stand_ins.scheduler.update_from_output("kept", output) == ("kept", output)
    assert shown()["tokens_total", "engine0", "", ""] == 4


def test_gauges_follow_every_two_seconds(
    stand_ins: StandIns, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, later, value in ((7, 0, 7), (8, 1_900_000_000, 7), (9, 200_000_000, 9)):
        values = [gauges.Value(gauges.SLOTS, ("penalties",), number)]
        monkeypatch.setattr(gauges, "collect", lambda values=values: values)
        clock.now += later
        stand_ins.runner.execute_model(scheduled())
        assert shown()["slots", "rank0", "penalties", ""] == value


def test_a_fence_is_named_after_its_owner_or_the_function_that_waits(stand_ins: StandIns) -> None:
    def update_async_output_token_ids() -> None:
        stand_ins.event().synchronize()

    def wait_for_all() -> None:
        update_async_output_token_ids()
        fences.wait(stand_ins.event(), "thinking-budget")
        methods._sync_device(lambda: None)()

    wait_for_all()  # while the engine starts
    assert counts() == {}
    stand_ins.runner.execute_model(scheduled())
    wait_for_all()
    completed = stand_ins.event()
    completed.completed = True
    completed.synchronize()  # not a wait, nor is the next one
    fences.wait(completed, "history")
    assert {owner: count for (name, _, owner), count in counts().items() if name == "fence"} == {
        "thinking-budget": 1,
        "update_async_output_token_ids": 1,
        "_sync_device": 1,
    }


class Pending(tuple[Any, ...]):
    """A step that is sampled when the tokens of the step before are known."""

    pending_structured_output_tokens = True


def test_a_wait_for_tokens_that_a_grammar_needs_has_its_name(stand_ins: StandIns) -> None:
    before = stand_ins.step(lambda: stand_ins.output("tokens"))
    for kind in (Pending, tuple):
        stand_ins.scheduler.kind = kind
        stand_ins.scheduler.schedule()
        stand_ins.runner.execute_model(
            scheduled(result=lambda: fences.wait(stand_ins.event(), "history"))
        )
        before.get_output()
        stand_ins.scheduler.update_from_output("kept", "output")
        before = stand_ins.runner.sample_tokens(lambda: stand_ins.output("tokens"))
    owners = {owner: count for (name, _, owner), count in counts().items() if name == "fence"}
    assert owners == {"history": 2, "grammars": 1, "get_output": 1}


class TimedEvent:
    """A CUDA event; each is recorded three milliseconds after the one before."""

    made: list["TimedEvent"]
    completed = False

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.made.append(self)

    def query(self) -> bool:
        return self.completed

    def elapsed_time(self, later: "TimedEvent") -> float:
        assert self.completed
        assert later.completed
        return 3.0 * (self.made.index(later) - self.made.index(self))


def test_device_times_are_read_without_a_wait(
    stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_has_device", lambda: True)
    monkeypatch.setattr("torch.cuda.Event", TimedEvent)
    TimedEvent.made = []
    stand_ins.step()
    assert not any(name == "device" for name, *_ in counts())
    for event in TimedEvent.made:
        event.completed = True
    stand_ins.runner.execute_model(scheduled())
    page = shown()
    for part in ("execute_model", "sample_tokens"):
        assert page["device_seconds_count", "rank0", part, ""] == 1
        assert page["device_seconds_sum", "rank0", part, ""] == 0.003
