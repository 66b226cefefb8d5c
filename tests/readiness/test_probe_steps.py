"""What the probe records of a step, on stand-ins with upstream's methods."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from probe import engines
from readiness.stand_ins import StandIns, recorded, scheduled, together
from support import probes
from vllm.v1.readiness.engine import fences
from vllm.v1.readiness.watch.probe import methods, recorder


def test_steps_are_numbered_and_timed(stand_ins: StandIns, file: Path) -> None:
    before = time.perf_counter_ns()
    for continuing in (0, 2):
        scheduler_output = scheduled(continuing=continuing)
        assert stand_ins.runner.execute_model(scheduler_output) == ("executed", False)
        assert stand_ins.runner.sample_tokens("sampled") == "sampled"
    after = time.perf_counter_ns()
    spans = recorded(file)
    kinds = [*("execute_model", "sample_tokens"), *("execute_model", "sample_tokens", "output")]
    assert [span.kind for span in spans] == kinds
    assert [span.step for span in spans] == [1, 1, 2, 2, 2]
    executed = recorded(file, "execute_model")
    assert [span.continuing for span in executed] == [0, 2]
    assert [span.continuing for span in recorded(file, "output")] == [2]
    assert {span.thread for span in spans} == {threading.get_ident()}
    times = [time for span in executed for time in (span.began, span.ended)]
    assert [before, *times, after] == sorted([before, *times, after])


def test_an_exception_is_passed_on_and_its_step_recorded(stand_ins: StandIns, file: Path) -> None:
    wrong = ValueError("wrong")
    calls: list[Callable[[], Any]] = [
        lambda: stand_ins.runner.execute_model(scheduled(result=wrong)),
        lambda: stand_ins.runner.sample_tokens(wrong),
        lambda: stand_ins.scheduler.update_from_output(wrong),
        lambda: stand_ins.output(wrong).get_output(),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="wrong") as caught:
            call()
        assert caught.value is wrong
    stand_ins.runner.execute_model(scheduled())
    fences.wait(stand_ins.event(), "history")  # the thread fetches no output any more
    assert [(span.kind, span.step) for span in recorded(file) if span.kind != "output"] == [
        *[(kind, 1) for kind in ("execute_model", "sample_tokens", "update_from_output")],
        *[("fence", 1), ("get_output", 1), ("execute_model", 2), ("fence", 2)],
    ]


def test_dummy_runs_and_empty_steps_are_left_out(stand_ins: StandIns, file: Path) -> None:
    assert stand_ins.runner.execute_model(scheduled(), dummy_run=True) == ("executed", True)
    assert stand_ins.runner.execute_model(scheduled(tokens=0)) == ("executed", False)
    assert recorder._recorder is None
    stand_ins.runner.execute_model(scheduled())
    assert [span.step for span in recorded(file)] == [1]


def test_an_output_has_its_own_steps_number_after_newer_steps_have_begun(
    stand_ins: StandIns, file: Path
) -> None:
    outputs: list[Any] = []
    for continuing in (4, 5, 6):
        outputs.append(stand_ins.step(lambda: stand_ins.output("tokens"), continuing))
        if len(outputs) > 1:
            together(outputs[-2].get_output)
    for kind in ("get_output", "fence"):
        assert [span.step for span in recorded(file, kind)] == [1, 2]
    (between,) = recorded(file, "output")
    first, second = recorded(file, "get_output")
    assert (between.began, between.ended) == (first.ended, second.ended)
    assert (between.step, between.continuing) == (2, 5)
    assert first.thread != recorded(file, "sample_tokens")[0].thread
    # The waits of this thread belong to the newest step meanwhile.
    fences.wait(stand_ins.event(), "history")
    assert recorded(file, "fence")[-1].step == 3


def test_an_output_is_delivered_at_most_once(stand_ins: StandIns, file: Path) -> None:
    """Synchronous runner V2 takes it within sample_tokens; a pipeline's middle rank has none."""
    for sampled in (
        lambda: stand_ins.output("tokens").get_output(),
        lambda: stand_ins.output("tokens").get_output(),
        None,
        "tokens",
    ):
        stand_ins.step(sampled)
    assert [span.step for span in recorded(file, "output")] == [2, 4]


def test_an_output_from_before_the_probe_is_left_alone(stand_ins: StandIns, file: Path) -> None:
    stand_ins.runner.execute_model(scheduled())
    output = stand_ins.output.__new__(stand_ins.output)
    output.result, output.async_copy_ready_event = "tokens", stand_ins.event()
    assert output.get_output() == "tokens"
    assert recorded(file, "get_output") == []


@pytest.mark.parametrize(
    ("parallel", "label"),
    [
        ({}, "rank0"),
        ({"rank": 3}, "rank3"),
        ({"rank": 1, "data_parallel_size": 2, "data_parallel_index": 0}, "dp0-rank1"),
        # Replicas that know nothing of each other: the size is 1.
        ({"data_parallel_index": 1}, "dp1-rank0"),
    ],
)
def test_each_process_has_a_file_of_its_own(
    file: Path, parallel: dict[str, int], label: str
) -> None:
    StandIns(**parallel).step()
    assert recorded(file, label=label)
    assert engines._LABEL.fullmatch(label)


# Fences.


def test_a_fence_is_named_after_its_owner_or_the_function_that_waits(
    stand_ins: StandIns, file: Path
) -> None:
    stand_ins.runner.execute_model(scheduled())

    def update_async_output_token_ids() -> None:
        stand_ins.event().synchronize()

    fences.wait(stand_ins.event(), "thinking-budget")
    update_async_output_token_ids()
    completed = stand_ins.event()
    completed.completed = True
    completed.synchronize()  # not a wait, nor is the next one
    fences.wait(completed, "history")
    spans = recorded(file, "fence")
    assert [span.owner for span in spans] == ["thinking-budget", "update_async_output_token_ids"]
    assert all(span.length >= 0 for span in spans)


class Pending(tuple[Any, ...]):
    """A step that is sampled when the tokens of the step before are known."""

    pending_structured_output_tokens = True


def test_a_wait_for_tokens_that_a_grammar_needs_has_its_name(
    stand_ins: StandIns, file: Path
) -> None:
    """The core waits in get_output where its worker is in the same process, or for another one."""
    before = stand_ins.step(lambda: stand_ins.output("tokens"))
    for kind in (Pending, tuple):
        stand_ins.scheduler.kind = kind
        stand_ins.scheduler.schedule()
        stand_ins.runner.execute_model(
            scheduled(result=lambda: fences.wait(stand_ins.event(), "history"))
        )
        before.get_output()
        stand_ins.scheduler.update_from_output("output")
        before = stand_ins.runner.sample_tokens(lambda: stand_ins.output("tokens"))
    owners = [span.owner for span in recorded(file, "fence")]
    assert owners == ["history", "grammars", "history", "get_output"]


def test_a_core_without_a_worker_waits_for_a_grammar_until_it_takes_tokens_in(
    stand_ins: StandIns, file: Path
) -> None:
    for kind in (Pending, tuple):
        stand_ins.scheduler.kind = kind
        assert stand_ins.scheduler.schedule(1) == (1,)
        assert stand_ins.scheduler.update_from_output("output") == "output"
    spans = recorded(file, label="engine0")
    assert [(span.kind, span.owner) for span in spans] == [
        ("schedule", ""),
        ("fence", "grammars"),
        *(("update_from_output", ""), ("schedule", ""), ("update_from_output", "")),
    ]
    first, fence, update, *_ = spans
    assert first.ended <= fence.began <= fence.ended <= update.began


def test_waits_while_an_engine_starts_are_left_out(stand_ins: StandIns, file: Path) -> None:
    """It is not known yet whether the process is a worker or an engine core."""

    def _sync_device() -> None:
        """Upstream's profiling ends with one."""

    for wait in (
        methods._sync_device(_sync_device),
        lambda: stand_ins.event().synchronize(),
        lambda: fences.wait(stand_ins.event(), "warm-up"),
    ):
        wait()
    assert recorder._recorder is None
    stand_ins.scheduler.schedule()
    fences.wait(stand_ins.event(), "history")
    assert [span.owner for span in recorded(file, "fence", "engine0")] == ["history"]


@pytest.mark.parametrize("whose", ["ours", "another's", "nobody's"])
def test_a_core_that_turns_out_to_run_a_worker_removes_only_its_own_file(
    stand_ins: StandIns, file: Path, warned: Callable[[], list[str]], whose: str
) -> None:
    stand_ins.scheduler.schedule()
    early = Path(f"{file}.engine0")
    assert recorded(file, label="engine0")
    if whose == "another's":
        probes.written(early, [], pid=os.getpid() + 1)
    elif whose == "nobody's":
        early.unlink()
    stand_ins.runner.execute_model(scheduled())
    assert recorded(file)
    assert early.exists() == (whose == "another's")
    probes.written(early, [])  # by another process, later on
    assert recorded(file)
    assert early.exists()
    assert warned() == []
