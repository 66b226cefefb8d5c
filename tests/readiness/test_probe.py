"""What the probe watches: stand-ins with upstream's methods, and upstream's own classes."""

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from probe import records
from probe.records import Span
from support import probes
from support.device import Device, installed
from vllm.v1.core.sched import scheduler
from vllm.v1.readiness import fences, outputs, probe, switch
from vllm.v1.readiness.probe_ring import Ring
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu import async_utils

CONFIG = SimpleNamespace(
    parallel_config=SimpleNamespace(rank=0, data_parallel_index=0, data_parallel_size=1)
)
MODULES: list[Any] = [gpu_model_runner, async_utils, scheduler]


def scheduled(tokens: int = 1, continuing: int = 1, first: str = "request-0") -> Any:
    """What a scheduler hands to a runner."""
    cached = SimpleNamespace(req_ids=[f"request-{n}" for n in range(continuing)])
    return SimpleNamespace(
        total_num_scheduled_tokens=tokens,
        num_scheduled_tokens={first: tokens} if tokens else {},
        scheduled_cached_reqs=cached,
    )


class Standing:
    """Stand-ins for upstream's classes, which are watched."""

    def __init__(self) -> None:
        class Event:
            """Completes when it is waited for."""

            def __init__(self) -> None:
                self.completed = False

            def query(self) -> bool:
                return self.completed

            def synchronize(self) -> None:
                self.completed = True

        class Runner:
            vllm_config = CONFIG

            def execute_model(self, scheduler_output: Any, dummy_run: bool = False) -> Any:
                if isinstance(scheduler_output, Exception):
                    raise scheduler_output
                return "executed", dummy_run

            def sample_tokens(self, grammar_output: Any) -> Any:
                if isinstance(grammar_output, Exception):
                    raise grammar_output
                return grammar_output() if callable(grammar_output) else grammar_output

        class Output:
            def __init__(self, result: Any) -> None:
                self.result = result
                self.async_copy_ready_event = Event()

            def get_output(self) -> Any:
                self.async_copy_ready_event.synchronize()
                if isinstance(self.result, Exception):
                    raise self.result
                return self.result

        class Scheduler:
            vllm_config = CONFIG

            def schedule(self, *arguments: Any) -> Any:
                return arguments

            def update_from_output(self, sampled: Any) -> Any:
                if isinstance(sampled, Exception):
                    raise sampled
                return sampled

        Event.synchronize = probe._synchronize(Event.synchronize)  # type: ignore[method-assign]
        module: Any = SimpleNamespace(
            GPUModelRunner=Runner, AsyncGPUModelRunnerOutput=Output, Scheduler=Scheduler
        )
        for _ in range(2):  # watching twice is watching once
            probe._watch_runner(module)
            probe._watch_scheduler(module)
        self.event: Any = Event
        self.runner: Any = Runner()
        self.output: Any = Output
        self.scheduler: Any = Scheduler()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this process records to, without a thread that runs on."""
    file = tmp_path / "file"
    monkeypatch.setattr(probe, "_path", str(file))
    monkeypatch.setattr(probe, "_recorder", None)
    monkeypatch.setattr(probe, "_plain", torch.Event, raising=False)
    monkeypatch.setattr(probe.Recorder, "run", lambda _: None)
    monkeypatch.setattr(fences, "listeners", [probe._fence])
    probe._tell.cache_clear()
    return file


@pytest.fixture
def standing(file: Path) -> Standing:
    assert file
    return Standing()


@pytest.fixture
def said() -> Iterator[Callable[[], list[str]]]:
    """What the probe has logged."""
    with probes.logged(probe) as sentences:
        yield sentences


def recorded(file: Path, label: str = "rank0") -> list[Span]:
    """What there is in the file, when it is written."""
    probe.recorder().write()
    return records.read(Path(f"{file}.{label}")).spans


def of(spans: list[Span], kind: str) -> list[Span]:
    return [span for span in spans if span.kind == kind]


# What a step records.


def test_steps_are_numbered_and_timed(standing: Standing, file: Path) -> None:
    before = time.perf_counter_ns()
    for continuing in (0, 2):
        given = scheduled(continuing=continuing)
        assert standing.runner.execute_model(given) == ("executed", False)
        assert standing.runner.sample_tokens("sampled") == "sampled"
    after = time.perf_counter_ns()
    spans = recorded(file)
    kinds = [*("execute_model", "sample_tokens"), *("execute_model", "sample_tokens", "output")]
    assert [span.kind for span in spans] == kinds
    assert [span.step for span in spans] == [1, 1, 2, 2, 2]
    assert [span.continuing for span in of(spans, "execute_model")] == [0, 2]
    assert [span.continuing for span in of(spans, "output")] == [2]
    assert {span.thread for span in spans} == {threading.get_ident()}
    times = [time for span in of(spans, "execute_model") for time in (span.began, span.ended)]
    assert [before, *times, after] == sorted([before, *times, after])


def test_an_exception_is_passed_on_and_its_step_recorded(standing: Standing, file: Path) -> None:
    wrong = ValueError("wrong")

    def fail(*_: Any, **__: Any) -> None:
        raise wrong

    failing: Any = type("Failing", (type(standing.runner),), {})
    failing.execute_model = probe._execute_model(fail)
    broken: Any = failing()
    output = standing.output(wrong)
    calls: list[Callable[[], Any]] = [
        lambda: broken.execute_model(scheduled()),
        lambda: standing.runner.sample_tokens(wrong),
        lambda: standing.scheduler.update_from_output(wrong),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="wrong") as caught:
            call()
        assert caught.value is wrong
    standing.runner.execute_model(scheduled())
    output = standing.output(wrong)
    with pytest.raises(ValueError, match="wrong"):
        output.get_output()
    standing.runner.sample_tokens("sampled")
    spans = recorded(file)
    for kind, count in (("execute_model", 2), ("sample_tokens", 2), ("update_from_output", 1)):
        assert len(of(spans, kind)) == count
    assert [span.step for span in of(spans, "get_output")] == [2]
    # The thread is out of the output again.
    fences.wait(standing.event(), "history")
    assert of(recorded(file), "fence")[-1].step == 2


def test_dummy_runs_and_empty_steps_are_left_out(standing: Standing, file: Path) -> None:
    assert standing.runner.execute_model(scheduled(), dummy_run=True) == ("executed", True)
    assert standing.runner.execute_model(scheduled(tokens=0)) == ("executed", False)
    assert probe._recorder is None
    standing.runner.execute_model(scheduled())
    assert [span.step for span in recorded(file)] == [1]


def test_an_output_bears_its_steps_number_though_newer_steps_have_begun(
    standing: Standing, file: Path
) -> None:
    runner = standing.runner
    outputs = []
    for continuing in (4, 5, 6):
        runner.execute_model(scheduled(continuing=continuing))
        outputs.append(runner.sample_tokens(lambda: standing.output("tokens")))
        if len(outputs) > 1:
            thread = threading.Thread(target=outputs[-2].get_output)
            thread.start()
            thread.join()
    spans = recorded(file)
    assert [span.step for span in of(spans, "get_output")] == [1, 2]
    assert [span.step for span in of(spans, "fence")] == [1, 2]
    (between,) = of(spans, "output")
    first, second = of(spans, "get_output")
    assert (between.began, between.ended) == (first.ended, second.ended)
    assert (between.step, between.continuing) == (2, 5)
    assert first.thread != of(spans, "sample_tokens")[0].thread
    # What this thread waits for meanwhile is the newest step's.
    fences.wait(standing.event(), "history")
    assert of(recorded(file), "fence")[-1].step == 3


def test_an_output_taken_within_sample_tokens_is_handed_out_once(
    standing: Standing, file: Path
) -> None:
    """Runner V2 does so under synchronous scheduling."""
    for _ in range(3):
        standing.runner.execute_model(scheduled())
        standing.runner.sample_tokens(lambda: standing.output("tokens").get_output())
    assert [span.step for span in of(recorded(file), "output")] == [2, 3]


def test_a_step_without_an_output_hands_out_none(standing: Standing, file: Path) -> None:
    """As one of a rank in the middle of a pipeline."""
    for result in ("tokens", None, "tokens"):
        standing.runner.execute_model(scheduled())
        standing.runner.sample_tokens(result)
    assert [span.step for span in of(recorded(file), "output")] == [3]


def test_an_output_made_before_the_probe_was_there_is_left_alone(
    standing: Standing, file: Path
) -> None:
    standing.runner.execute_model(scheduled())
    output = standing.output.__new__(standing.output)
    output.result, output.async_copy_ready_event = "tokens", standing.event()
    assert output.get_output() == "tokens"
    assert of(recorded(file), "get_output") == []


def test_the_schedulers_part_is_recorded(standing: Standing, file: Path) -> None:
    assert standing.scheduler.schedule(1) == (1,)
    assert standing.scheduler.update_from_output("output") == "output"
    assert [span.kind for span in recorded(file, "engine0")] == ["schedule", "update_from_output"]


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
    standing: Standing, file: Path, parallel: dict[str, int], label: str
) -> None:
    given = SimpleNamespace(**{**vars(CONFIG.parallel_config), **parallel})
    standing.runner.vllm_config = SimpleNamespace(parallel_config=given)
    standing.runner.execute_model(scheduled())
    assert recorded(file, label)
    assert records._LABEL.fullmatch(label)


# Fences.


def test_a_wait_by_name_is_one_fence_with_its_owners_name(standing: Standing, file: Path) -> None:
    standing.runner.execute_model(scheduled())
    fences.wait(standing.event(), "thinking-budget")
    (fence,) = of(recorded(file), "fence")
    assert fence.owner == "thinking-budget"
    assert fence.length >= 0


def test_any_other_wait_bears_the_name_of_the_function_that_waits(
    standing: Standing, file: Path
) -> None:
    standing.runner.execute_model(scheduled())

    def update_async_output_token_ids() -> None:
        standing.event().synchronize()

    update_async_output_token_ids()
    (fence,) = of(recorded(file), "fence")
    assert fence.owner == "update_async_output_token_ids"


def test_who_does_not_wait_is_no_fence(standing: Standing, file: Path) -> None:
    standing.runner.execute_model(scheduled())
    event = standing.event()
    event.completed = True
    event.synchronize()
    fences.wait(event, "history")
    assert of(recorded(file), "fence") == []


def test_owners_are_kept_apart_whichever_thread_is_first(standing: Standing, file: Path) -> None:
    standing.runner.execute_model(scheduled())
    names = [f"owner-{n % 7}" for n in range(70)]
    threads = [
        threading.Thread(target=fences.wait, args=(standing.event(), name)) for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(span.owner for span in of(recorded(file), "fence")) == sorted(names)


def test_what_is_waited_for_while_an_engine_starts_is_no_steps(
    standing: Standing, file: Path
) -> None:
    """And no reason to record: what this process is, is not known yet."""
    assert file

    def _sync_device() -> None:
        """Upstream's profiling ends with one."""

    for wait in (
        probe._sync_device(_sync_device),
        lambda: standing.event().synchronize(),
        lambda: fences.wait(standing.event(), "warm-up"),
    ):
        wait()
    assert probe._recorder is None
    standing.scheduler.schedule()
    fences.wait(standing.event(), "history")
    assert [span.owner for span in of(recorded(file, "engine0"), "fence")] == ["history"]


def test_threads_that_are_first_at_once_make_one_recorder(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert file
    monkeypatch.setattr(probe.Recorder, "run", lambda _: time.sleep(0.01))
    found: list[probe.Recorder] = []
    threads = [threading.Thread(target=lambda: found.append(probe.recorder())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(map(id, found))) == 1


@pytest.mark.parametrize("whose", ["ours", "another's", "nobody's"])
def test_a_core_that_turns_out_to_run_a_worker_takes_back_no_file_but_its_own(
    standing: Standing, file: Path, said: Callable[[], list[str]], whose: str
) -> None:
    standing.scheduler.schedule()
    early = Path(f"{file}.engine0")
    assert recorded(file, "engine0")
    if whose == "another's":
        probes.written(early, [], pid=os.getpid() + 1)
    elif whose == "nobody's":
        early.unlink()
    standing.runner.execute_model(scheduled())
    assert recorded(file)
    assert early.exists() == (whose == "another's")
    probes.written(early, [])  # by another process, later on
    assert recorded(file)
    assert early.exists()
    assert said() == []


# Upstream's classes, on a device that is simulated.


class Timed(Device):
    """A device whose events say when it was past them; it goes on when it is waited for."""

    def __init__(self) -> None:
        super().__init__(lambda _: 0)
        self.timing = True
        self.waits = 0
        stream, event = self.Stream, self.Event
        device = self

        class Stream(stream):  # type: ignore[misc, valid-type]
            def __init__(self, *arguments: Any, **named: Any) -> None:
                super().__init__(*arguments, **named)
                self.times: dict[int, int] = {}

            def execute(self, place: int) -> None:
                while self.done < place:
                    super().execute(self.done + 1)
                    self.times[self.done] = time.perf_counter_ns()

        class Event(event):  # type: ignore[misc, valid-type]
            timing: bool

            def __new__(cls, *_: Any, enable_timing: bool = False) -> "Event":
                made: Event = super().__new__(cls)
                made.timing = enable_timing  # where torch's own types take it
                return made

            def synchronize(self) -> None:
                device.waits += 1
                super().synchronize()

            def elapsed_time(self, other: Any) -> float:
                if not (self.timing and other.timing and device.timing):
                    raise RuntimeError("made without enable_timing=True")
                assert self.passed()
                assert other.passed()
                times = [each.behind[0].times[each.behind[1]] for each in (self, other)]
                return float(times[1] - times[0]) / 1e6

        self.Stream, self.Event = Stream, Event
        self.default = self.Stream()


@pytest.fixture
def device(file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Timed]:
    """It is there, and upstream's classes are watched for a while."""
    monkeypatch.setenv(switch.PROBE, str(file))
    monkeypatch.setattr(probe, "_path", None)
    monkeypatch.setattr(fences, "listeners", [])
    monkeypatch.setattr(probe, "_has_device", lambda: True)
    monkeypatch.setattr(os, "register_at_fork", lambda **_: None)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda _: None)
    monkeypatch.setattr(probe, "_importing", probe._Importing())
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    owners = [
        gpu_model_runner.GPUModelRunner,
        gpu_model_runner.AsyncGPUModelRunnerOutput,
        async_utils.AsyncOutput,
        scheduler.Scheduler,
    ]
    for name in probe._WATCHED:
        if name in sys.modules:
            owners += [v for v in vars(sys.modules[name]).values() if isinstance(v, type)]
    with ExitStack() as stack:
        found = stack.enter_context(installed(Timed()))
        assert isinstance(found, Timed)
        before = [(each, dict(vars(each))) for each in owners]
        probe.install()
        probe.install()
        yield found
    for each, attributes in before:
        for name, value in vars(each).copy().items():
            if name in attributes and attributes[name] is not value:
                setattr(each, name, attributes[name])


def v1_output(device: Timed) -> Any:
    return gpu_model_runner.AsyncGPUModelRunnerOutput(
        model_runner_output=SimpleNamespace(sampled_token_ids=None, logprobs=None),
        sampled_token_ids=torch.tensor([[5], [7]]),
        logprobs_tensors=None,
        invalid_req_indices=[1],
        async_output_copy_stream=device.Stream(),
        vocab_size=10,
    )


def v2_output(device: Timed) -> Any:
    return async_utils.AsyncOutput(
        model_runner_output=SimpleNamespace(prompt_logprobs_dict={}, req_ids=["a", "b"]),
        sampler_output=SimpleNamespace(
            sampled_token_ids=torch.tensor([[5], [7]]), logprobs_tensors=None, num_nans=None
        ),
        num_sampled_tokens=torch.tensor([1, 0]),
        main_stream=device.default,
        copy_stream=device.Stream(),
    )


@pytest.mark.parametrize("made", [v1_output, v2_output])
@pytest.mark.parametrize("ready", [False, True])
def test_an_asynchronous_output_of_upstreams(
    device: Timed, file: Path, made: Callable[[Timed], Any], ready: bool
) -> None:
    """It gives what it gives, and its copy is seen from its start until it is taken."""
    mine = probe.recorder()
    for _ in range(3):
        mine.begin(CONFIG, 2)
        output = made(device)
        launched = time.perf_counter_ns()
        mine.begin(CONFIG, 2)
        if ready:
            for stream in device.streams:
                stream.finish()
        before = time.perf_counter_ns()
        assert output.get_output().sampled_token_ids == [[5], []]
        after = time.perf_counter_ns()
        spans = recorded(file)
        (got, copied) = (of(spans, kind)[-1] for kind in ("get_output", "readback"))
        assert got.step == copied.step == mine.step - 1
        assert launched <= copied.ended <= copied.consumed <= after
        assert copied.began <= copied.ended
        assert got.began <= copied.consumed < got.ended  # seen before it was made a list
        if not ready:
            fence = of(spans, "fence")[-1]
            assert fence.owner == "get_output"
            assert fence.step == got.step
            assert copied.ended == copied.consumed == fence.ended
            assert before <= fence.began
    assert len(of(spans, "fence")) == (0 if ready else 3)
    assert len(of(spans, "output")) == 2


def test_events_that_tell_no_time_leave_readbacks_out(
    device: Timed, file: Path, said: Callable[[], list[str]]
) -> None:
    device.timing = False
    probe.recorder().begin(CONFIG, 1)
    for _ in range(2):
        assert v1_output(device).get_output().sampled_token_ids == [[5], []]
    spans = recorded(file)
    assert len(of(spans, "get_output")) == 2
    assert of(spans, "readback") == []
    assert len([sentence for sentence in said() if "readbacks are left out" in sentence]) == 1


def test_an_output_that_fails_before_its_copy_was_seen_has_no_readback(
    device: Timed, file: Path
) -> None:
    """The copy that was seen before is another one's."""
    probe.recorder().begin(CONFIG, 1)
    first, second = v1_output(device), v1_output(device)
    first.get_output()
    second.sampled_token_ids_cpu = None
    with pytest.raises(AttributeError):
        second.get_output()
    spans = recorded(file)
    assert len(of(spans, "get_output")) == 2
    assert len(of(spans, "readback")) == 1


def test_only_an_outputs_event_is_made_to_tell_the_time(device: Timed) -> None:
    """Others cost the device nothing more than without the probe."""
    assert not torch.Event().timing
    assert not torch.cuda.Event().timing
    probe.recorder().begin(CONFIG, 1)
    assert v1_output(device).async_copy_ready_event.timing
    assert v2_output(device).copy_event.timing
    assert not torch.Event().timing


class Sampled(torch.Tensor):  # type: ignore[misc]
    """Ids on a device."""

    is_cpu = False


def on_device() -> Any:
    return torch.tensor([[5], [7]]).as_subclass(Sampled)


def test_a_synchronous_readback_of_upstreams(device: Timed, file: Path) -> None:
    """``_to_list``: a pinned copy, an event, and a wait for it."""
    runner = gpu_model_runner.GPUModelRunner.__new__(gpu_model_runner.GPUModelRunner)
    runner.sampled_token_ids_pinned_cpu = torch.zeros(4, 1, dtype=torch.int64)
    runner.transfer_event = torch.Event()
    mine = probe.recorder()
    events = []
    for step in (1, 2):
        mine.begin(CONFIG, 1)
        before = time.perf_counter_ns()
        assert runner._to_list(on_device()) == [[5], [7]]
        after = time.perf_counter_ns()
        events.append(runner.transfer_event)
        spans = recorded(file)
        copied, fence = of(spans, "readback")[-1], of(spans, "fence")[-1]
        assert fence.owner == "_to_list"
        assert before <= copied.began <= copied.ended == copied.consumed == fence.ended <= after
        assert len(of(spans, "readback")) == len(of(spans, "fence")) == device.waits == step
    assert events[0] is events[1]
    assert events[0].timing
    assert not torch.Event().timing
    assert device.copies == 0


class Synchronous:
    """Stands for the overlaid runner, as it is scheduled synchronously."""

    def __init__(self, on: bool) -> None:
        batch: Any = SimpleNamespace(
            device=torch.device("cpu"), pin_memory=False, is_pooling_model=False, max_num_reqs=2
        )
        self.outputs = outputs.Outputs(batch, 0, on)
        self.transfer_event: Any = torch.Event()

    def sample(self) -> Any:
        return self._to_list(
            self.outputs.show(
                SimpleNamespace(sampled_token_ids=on_device(), logprobs_tensors=None)
            )[0]
        )

    def _to_list(self, ids: torch.Tensor) -> Any:
        if not ids.is_cpu:
            self.transfer_event.record()
            self.transfer_event.synchronize()
        time.sleep(0.02)  # waking up, and making a list
        return ids.tolist()


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("ready", [True, False])
def test_a_synchronous_step_has_one_readback_and_no_wait_of_the_probes(
    device: Timed, file: Path, on: bool, ready: bool
) -> None:
    """However the overlay's readbacks are switched. It lasts until the device is done."""
    if ready:
        device.decide = lambda count: count - 1
    probe._replace(Synchronous, "_to_list", probe._to_list)
    runner = Synchronous(on)
    mine = probe.recorder()
    for step in (1, 2, 3):
        mine.begin(CONFIG, 1)
        assert runner.sample() == [[5], [7]]
        spans = recorded(file)
        owners = [span.owner for span in of(spans, "fence")]
        assert owners == ([] if ready else ["output" if on else "_to_list"] * step)
        assert [span.step for span in of(spans, "readback")] == [*range(1, step + 1)]
    assert all(span.length < 10_000_000 for span in of(spans, "readback"))
    # Upstream's code waits for an event whether or not it has completed.
    assert device.waits == (0 if ready and on else 3)
    # What has been shown already is not timed once more.
    assert runner.transfer_event.timing == (not on)


def test_a_wait_for_the_whole_device_is_a_fence(
    device: Timed, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert device
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    runner = gpu_model_runner.GPUModelRunner.__new__(gpu_model_runner.GPUModelRunner)
    probe.recorder().begin(CONFIG, 1)
    runner._sync_device()
    assert [span.owner for span in of(recorded(file), "fence")] == ["_sync_device"]


def test_upstreams_methods_keep_their_names(device: Timed) -> None:
    """And what they are called with, which others ask them for."""
    assert device
    watched: Any = gpu_model_runner.GPUModelRunner.execute_model
    assert watched.__name__ == "execute_model"
    assert watched.__wrapped__
    assert not hasattr(watched.__wrapped__, "_probed")


# Who is watched, and when.


def test_without_the_variable_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(switch.PROBE, raising=False)
    threads = threading.active_count()
    classes = [v for m in MODULES for v in vars(m).values() if isinstance(v, type)]
    before = [*map(id, sys.meta_path), id(torch.Event), id(torch.cuda.Event.synchronize)]
    attributes = [dict(vars(each)) for each in classes]
    handler = signal.getsignal(signal.SIGUSR2)
    probe.install()
    assert probe._path is None
    assert probe._recorder is None
    assert fences.listeners == []
    assert threading.active_count() == threads
    assert signal.getsignal(signal.SIGUSR2) == handler
    assert [dict(vars(each)) for each in classes] == attributes
    after = [*map(id, sys.meta_path), id(torch.Event), id(torch.cuda.Event.synchronize)]
    assert before == after


def test_modules_imported_before_and_after_are_watched_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "watched_before.py").write_text("VALUE = 1")
    (tmp_path / "watched_after.py").write_text("VALUE = 2")
    (tmp_path / "watched_never.py").write_text("VALUE = 3")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(probe, "_importing", probe._Importing())
    told: list[tuple[str, int]] = []

    def watch(module: ModuleType) -> None:
        told.append((module.__name__, module.VALUE))

    __import__("watched_before")
    for name in ("watched_before", "watched_after", "watched_missing"):
        probe._when_imported(name, watch)
    assert told == [("watched_before", 1)]
    __import__("watched_after")
    __import__("watched_after")
    __import__("watched_never")
    assert told == [("watched_before", 1), ("watched_after", 2)]
    with pytest.raises(ModuleNotFoundError):
        __import__("watched_missing")
    assert sys.modules["watched_after"].__spec__ is not None
    for name in ("watched_before", "watched_after", "watched_never"):
        del sys.modules[name]


def test_a_path_that_cannot_be_is_an_error_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(switch.PROBE, str(tmp_path / "none" / "file"))
    with pytest.raises(switch.PathError):
        probe.install()
    assert probe._path is None


# Processes. A child does what a worker does: it installs the probe, makes some steps and ends.


class Child(NamedTuple):
    """A child, and the end of a pipe to it."""

    process: Any
    pipe: Any

    def hears(self, word: str) -> None:
        """Wait until it says so."""
        assert self.pipe.poll(60)
        assert self.pipe.recv() == word

    def end(self) -> None:
        self.pipe.send("end")
        self.process.join(60)
        assert self.process.exitcode == 0


def start(file: Path, work: Callable[[Any], None]) -> Child:
    """A child that installs the probe and works."""
    mine, its = multiprocessing.Pipe()
    context: Any = multiprocessing.get_context("fork")
    process = context.Process(target=_child, args=(str(file), work, its))
    process.start()
    return Child(process, mine)


def _child(file: str, work: Callable[[Any], None], pipe: Any) -> None:
    sink = logging.FileHandler(f"{file}.log")
    logger = logging.getLogger("vllm.v1.readiness.probe")
    logger.addHandler(sink)
    logger.setLevel(logging.WARNING)
    os.environ[switch.PROBE] = file
    probe.install()
    work(pipe)
    sink.flush()


def steps(count: int, rank: int = 0) -> None:
    standing = Standing()
    standing.runner.vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(rank=rank, data_parallel_index=0, data_parallel_size=1)
    )
    for _ in range(count):
        standing.runner.execute_model(scheduled())
        standing.runner.sample_tokens("tokens")


def number(file: Path, rank: int = 0) -> int:
    """How many steps there are in a file."""
    return len(records.read(Path(f"{file}.rank{rank}")).of("execute_model"))


def make_three(_: Any) -> None:
    steps(3)


def test_a_child_writes_its_file_when_it_ends(tmp_path: Path) -> None:
    before = time.perf_counter_ns()
    child = start(tmp_path / "file", make_three)
    child.process.join(60)
    assert child.process.exitcode == 0
    assert number(tmp_path / "file") == 3
    process = records.read(Path(f"{tmp_path / 'file'}.rank0"))
    assert before < process.header["started_ns"] < process.spans[0].began


def serve_until_sigterm(pipe: Any) -> None:
    def end(*_: object) -> None:
        raise SystemExit

    signal.signal(signal.SIGTERM, end)  # as vLLM's workers do
    steps(4)
    pipe.send("ready")
    time.sleep(60)


def test_a_child_that_is_terminated_writes_its_file(tmp_path: Path) -> None:
    child = start(tmp_path / "file", serve_until_sigterm)
    child.hears("ready")
    child.process.terminate()
    child.process.join(60)
    assert number(tmp_path / "file") == 4


def serve(pipe: Any) -> None:
    steps(2)
    pipe.send("ready")
    while not pipe.poll(0.05):
        pass
    steps(5)


def test_a_signal_has_the_file_written_while_the_process_goes_on(tmp_path: Path) -> None:
    child = start(tmp_path / "file", serve)
    child.hears("ready")
    began = time.monotonic()
    assert child.process.pid
    for _ in range(3):
        os.kill(child.process.pid, signal.SIGUSR2)
    until(lambda: Path(f"{tmp_path / 'file'}.rank0").exists())
    assert time.monotonic() - began < 2
    assert number(tmp_path / "file") == 2
    assert child.process.is_alive()
    child.end()
    assert number(tmp_path / "file") == 7


def serve_and_be_killed(pipe: Any) -> None:
    probe.PERIOD = 0.1
    steps(2)
    pipe.send("ready")
    pipe.recv()


def test_a_file_is_written_when_nothing_has_happened_for_a_while(tmp_path: Path) -> None:
    """A server ends its engine's core by SIGKILL, and at once."""
    child = start(tmp_path / "file", serve_and_be_killed)
    child.hears("ready")
    until(lambda: Path(f"{tmp_path / 'file'}.rank0").exists())
    written = Path(f"{tmp_path / 'file'}.rank0").stat().st_mtime_ns
    time.sleep(0.5)
    assert Path(f"{tmp_path / 'file'}.rank0").stat().st_mtime_ns == written
    child.process.kill()
    child.process.join(60)
    assert number(tmp_path / "file") == 2


def serve_with_a_handler(pipe: Any) -> None:
    signal.signal(signal.SIGUSR2, lambda *_: pipe.send("mine"))
    probe.listen()
    serve(pipe)


def test_a_signal_that_somebody_else_uses_is_theirs(tmp_path: Path) -> None:
    child = start(tmp_path / "file", serve_with_a_handler)
    child.hears("ready")
    assert child.process.pid
    os.kill(child.process.pid, signal.SIGUSR2)
    child.hears("mine")
    assert "SIGUSR2 is taken" in Path(f"{tmp_path / 'file'}.log").read_text()
    child.end()
    assert number(tmp_path / "file") == 7


def lose_the_directory(pipe: Any) -> None:
    steps(2)
    pipe.send("ready")
    pipe.recv()
    probe.recorder().write()
    steps(1)


def test_a_file_that_cannot_be_written_is_logged_and_ends_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    child = start(folder / "file", lose_the_directory)
    child.hears("ready")
    (folder / "file.log").rename(tmp_path / "log")
    folder.rmdir()
    child.end()
    assert f"cannot write {folder / 'file'}.rank0" in (tmp_path / "log").read_text()


def load(rank: int | None) -> Callable[[Any], None]:
    """What a worker or, without a rank, an engine's core does: it waits, and then steps."""

    def work(pipe: Any) -> None:
        probe.PERIOD = 0.05
        fences.wait(Standing().event(), "warm-up")
        time.sleep(8 * probe.PERIOD)  # there is more to load
        pipe.send("loaded")
        pipe.recv()
        if rank is None:
            Standing().scheduler.schedule()
        else:
            steps(2, rank)
        pipe.send("stepped")
        pipe.recv()

    return work


def test_workers_that_wait_before_their_first_step_leave_the_cores_file_alone(
    tmp_path: Path,
) -> None:
    """As with tensor parallelism: which of them runs a core is not known until it steps."""
    file = tmp_path / "file"
    labels = ["engine0", "rank0", "rank1"]
    core, *workers = children = [start(file, load(rank)) for rank in (None, 0, 1)]
    for child in children:
        child.hears("loaded")
    assert [path.name for path in tmp_path.iterdir()] == ["file.log"]
    for child, label in zip(children, labels, strict=True):
        child.pipe.send("step")
        child.hears("stepped")
        until(Path(f"{file}.{label}.metrics").exists)
        until(Path(f"{file}.{label}").exists)
    time.sleep(0.4)
    core.process.kill()
    for child in workers:
        child.end()
    for child, label in zip(children, labels, strict=True):
        process = records.read(Path(f"{file}.{label}"))
        assert process.header["pid"] == child.process.pid
        assert process.header["owners"] == []
    assert Path(f"{file}.log").read_text() == ""


def step_when_told(pipe: Any) -> None:
    probe.PERIOD = 0.05
    pipe.send("ready")
    pipe.recv()
    steps(1, rank=1)
    pipe.recv()


def test_a_process_that_has_been_idle_is_of_the_same_engine_as_one_that_steps_late(
    tmp_path: Path,
) -> None:
    """Of two replicas, the first is killed before the second has anything to record."""
    late = start(tmp_path / "file", step_when_told)
    late.hears("ready")
    early = start(tmp_path / "file", serve_and_be_killed)
    early.hears("ready")
    until(lambda: Path(f"{tmp_path / 'file'}.rank0").exists())
    early.process.kill()
    early.process.join(60)
    late.pipe.send("step")
    until(lambda: Path(f"{tmp_path / 'file'}.rank1").exists())
    late.end()
    found, left_out = records.engine(tmp_path / "file")
    assert [each.label for each in found] == ["rank0", "rank1"]
    assert left_out == []


def fail_to_write(pipe: Any) -> None:
    probe.PERIOD = 0.05
    write = Ring.write
    tries = []

    def fail(*arguments: Any) -> None:
        tries.append(arguments)
        raise RuntimeError("an error of the device")

    class EngineCore:
        def shutdown(self) -> str:
            return "shut down"

    module: Any = SimpleNamespace(EngineCore=EngineCore)
    probe._watch_core(module)
    Ring.write = fail  # type: ignore[method-assign, assignment]
    steps(1)
    until(lambda: len(tries) > 0)
    os.kill(os.getpid(), signal.SIGUSR2)
    until(lambda: len(tries) > 1)
    pipe.send(EngineCore().shutdown())
    Ring.write = write  # type: ignore[method-assign]
    os.kill(os.getpid(), signal.SIGUSR2)
    until(lambda: Path(f"{os.environ[switch.PROBE]}.rank0").exists())
    pipe.send("written")
    Ring.write = fail  # type: ignore[method-assign, assignment]


def test_an_error_of_any_kind_is_logged_once_and_ends_neither_thread_nor_engine(
    tmp_path: Path,
) -> None:
    child = start(tmp_path / "file", fail_to_write)
    child.hears("shut down")
    child.hears("written")
    child.process.join(60)
    assert child.process.exitcode == 0
    assert number(tmp_path / "file") == 1
    log = Path(f"{tmp_path / 'file'}.log").read_text()
    assert log.count("\n") == 1
    assert "rank0: RuntimeError: an error of the device" in log


def install_in_a_thread(pipe: Any, file: str) -> None:
    os.environ[switch.PROBE] = file
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    thread = threading.Thread(target=probe.install)
    thread.start()
    thread.join()
    if not (child := os.fork()):
        probe.install()  # as vLLM does in each process
        os.kill(os.getpid(), signal.SIGUSR2)
        os._exit(0)
    pipe.send(os.waitpid(child, 0)[1])


def test_a_signal_ends_no_fork_of_a_process_that_was_watched_by_another_thread(
    tmp_path: Path,
) -> None:
    """Only a main thread can have signals handled."""
    mine, its = multiprocessing.Pipe()
    context: Any = multiprocessing.get_context("fork")
    process = context.Process(target=install_in_a_thread, args=(its, str(tmp_path / "file")))
    process.start()
    assert mine.poll(60)
    assert mine.recv() == 0
    process.join(60)


def fork(pipe: Any) -> None:
    steps(3)
    probe._making.acquire()  # by another thread, for example
    child = os.fork()
    if child:
        probe._making.release()
    else:
        signal.alarm(30)
        with suppress(BaseException):
            steps(2, rank=1)
            probe.recorder().write()
            threads = [each.name for each in threading.enumerate()]
            pipe.send(threads.count("readiness-probe"))
        os._exit(0)
    os.wait()
    steps(1)


def test_a_fork_records_for_itself(tmp_path: Path) -> None:
    """Its parent's records are its parent's."""
    child = start(tmp_path / "file", fork)
    child.process.join(60)
    assert child.process.exitcode == 0
    assert child.pipe.poll(60)
    assert child.pipe.recv() == 1
    assert number(tmp_path / "file") == 4
    assert number(tmp_path / "file", 1) == 2
    first, second = (records.read(Path(f"{tmp_path / 'file'}.rank{n}")) for n in (0, 1))
    assert first.of("sample_tokens")[2].ended < second.header["started_ns"]


def end_the_core(pipe: Any) -> None:
    steps(2)

    class EngineCore:
        def shutdown(self) -> None:
            pipe.send(Path(f"{os.environ[switch.PROBE]}.rank0").exists())
            os._exit(0)

    module: Any = SimpleNamespace(EngineCore=EngineCore)
    probe._watch_core(module)
    EngineCore().shutdown()


def test_an_engines_core_writes_before_it_waits_for_its_workers(tmp_path: Path) -> None:
    child = start(tmp_path / "file", end_the_core)
    assert child.pipe.recv()
    child.process.join(60)
    assert number(tmp_path / "file") == 2


PROGRAM = """
import multiprocessing, sys, threading
from types import SimpleNamespace
import vllm.v1
vllm.v1.__path__.append(sys.argv[1])
from vllm.v1.readiness import probe

class Scheduler:
    vllm_config = SimpleNamespace()
    def schedule(self): return 1
    def update_from_output(self): return 2

class GPUModelRunner:
    vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(rank=5))
    def execute_model(self, given): return 1
    def sample_tokens(self, given): return 2

def work():
    probe.install()
    probe._watch_runner(SimpleNamespace(GPUModelRunner=GPUModelRunner))
    cached = SimpleNamespace(req_ids=[])
    given = SimpleNamespace(total_num_scheduled_tokens=1, num_scheduled_tokens={"a": 1},
                            scheduled_cached_reqs=cached)
    GPUModelRunner().execute_model(given)

if __name__ == "__main__":
    probe.install()
    threads = [each.name for each in threading.enumerate()]
    assert threads == ["MainThread"], threads
    probe._watch_scheduler(SimpleNamespace(Scheduler=Scheduler))
    Scheduler().schedule()
    child = multiprocessing.get_context("spawn").Process(target=work)
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


def test_a_program_and_a_child_that_it_spawns_write_when_they_end(tmp_path: Path) -> None:
    """Installing alone starts no thread: many processes have nothing to record."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), str(Path(probe.__file__).parents[1])]
    env = {**os.environ, switch.PROBE: str(tmp_path / "file")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for label, kind in (("engine0", "schedule"), ("rank5", "execute_model")):
        assert [s.kind for s in records.read(tmp_path / f"file.{label}").spans] == [kind]


def until(condition: Callable[[], bool]) -> None:
    """Wait for something, but not for ever."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
