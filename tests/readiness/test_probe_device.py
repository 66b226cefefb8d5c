"""The probe on upstream's own classes, with a simulated device."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from readiness.stand_ins import config, recorded
from support.device import Device, installed
from vllm.v1.core.sched import scheduler
from vllm.v1.readiness.engine import fences, switch
from vllm.v1.readiness.outputs import model_outputs as outputs
from vllm.v1.readiness.watch import probe, wrapping
from vllm.v1.readiness.watch.probe import events, methods, recorder
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu import async_utils
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

CONFIG = config()


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
                created: Event = super().__new__(cls)
                created.timing = enable_timing  # where torch's own types take it
                return created

            def synchronize(self) -> None:
                device.waits += 1
                super().synchronize()

            def elapsed_time(self, other: Any) -> float:
                if not (self.timing and other.timing and device.timing):
                    raise RuntimeError("made without enable_timing=True")
                assert self.passed()
                assert other.passed()
                times = [event.behind[0].times[event.behind[1]] for event in (self, other)]
                return float(times[1] - times[0]) / 1e6

        self.Stream, self.Event = Stream, Event
        self.default = self.Stream()


@pytest.fixture
def device(file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Timed]:
    """A device, on which upstream's classes are observed."""
    monkeypatch.setenv(switch.PROBE, str(file))
    monkeypatch.setattr(recorder, "_path", None)
    monkeypatch.setattr(fences, "listeners", [])
    monkeypatch.setattr(events, "_has_device", lambda: True)
    monkeypatch.setattr(os, "register_at_fork", lambda **_: None)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda _: None)
    monkeypatch.setattr(wrapping, "_hook", wrapping.ImportHook())
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    owners: list[type] = [
        *(GPUModelRunner, gpu_model_runner.AsyncGPUModelRunnerOutput),
        *(async_utils.AsyncOutput, scheduler.Scheduler),
    ]
    for name in methods.WATCHED:
        if name in sys.modules:
            owners += [v for v in vars(sys.modules[name]).values() if isinstance(v, type)]
    with ExitStack() as stack:
        simulated = stack.enter_context(installed(Timed()))
        assert isinstance(simulated, Timed)
        before = [(owner, dict(vars(owner))) for owner in owners]
        for _ in range(2):  # a second time changes nothing
            probe.install()
        yield simulated
    for owner, attributes in before:
        for name, value in vars(owner).copy().items():
            if name in attributes and attributes[name] is not value:
                setattr(owner, name, attributes[name])


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


@pytest.mark.parametrize("output_of", [v1_output, v2_output])
@pytest.mark.parametrize("ready", [False, True])
def test_an_asynchronous_outputs_copy_is_recorded_until_it_is_taken(
    device: Timed, file: Path, output_of: Callable[[Timed], Any], ready: bool
) -> None:
    mine = recorder.recorder()
    for _ in range(3):
        mine.begin_step(CONFIG, 2)
        output = output_of(device)
        launched = time.perf_counter_ns()
        mine.begin_step(CONFIG, 2)
        if ready:
            for stream in device.streams:
                stream.finish()
        before = time.perf_counter_ns()
        assert output.get_output().sampled_token_ids == [[5], []]
        after = time.perf_counter_ns()
        (got, copied) = (recorded(file, kind)[-1] for kind in ("get_output", "readback"))
        assert got.step == copied.step == mine.step - 1
        assert launched <= copied.ended <= copied.consumed <= after
        assert copied.began <= copied.ended
        assert got.began <= copied.consumed < got.ended  # seen before it was made a list
        if not ready:
            fence = recorded(file, "fence")[-1]
            assert fence.owner == "get_output"
            assert fence.step == got.step
            assert copied.ended == copied.consumed == fence.ended
            assert before <= fence.began
    assert len(recorded(file, "fence")) == (0 if ready else 3)
    assert len(recorded(file, "output")) == 2


def test_events_without_timing_leave_readbacks_out(
    device: Timed, file: Path, warned: Callable[[], list[str]]
) -> None:
    device.timing = False
    recorder.recorder().begin_step(CONFIG, 1)
    for _ in range(2):
        assert v1_output(device).get_output().sampled_token_ids == [[5], []]
    assert len(recorded(file, "get_output")) == 2
    assert recorded(file, "readback") == []
    assert len([sentence for sentence in warned() if "readbacks are not recorded" in sentence]) == 1


class OnDevice(torch.Tensor):  # type: ignore[misc]
    """Ids on a device."""

    is_cpu = False


def upstreams_runner() -> Any:
    """Return upstream's runner: a pinned copy, an event, and a wait for it."""
    runner = GPUModelRunner.__new__(GPUModelRunner)
    runner.sampled_token_ids_pinned_cpu = torch.zeros(4, 1, dtype=torch.int64)
    runner.transfer_event = torch.Event()
    return runner


class OverlaidRunner:
    """A stand-in for the overlaid runner, which is shown its samples by readbacks."""

    def __init__(self) -> None:
        batch: Any = SimpleNamespace(
            device=torch.device("cpu"), pin_memory=False, is_pooling_model=False, max_num_reqs=2
        )
        self.outputs = outputs.Outputs(batch, 0, True)
        self.transfer_event: Any = torch.Event()

    def _to_list(self, ids: torch.Tensor) -> Any:
        sampled: Any = SimpleNamespace(sampled_token_ids=ids, logprobs_tensors=None)
        return self._shown(self.outputs.show(sampled)[0])

    def _shown(self, ids: torch.Tensor) -> Any:
        return ids.tolist()


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("ready", [True, False])
def test_a_synchronous_step_has_one_readback_that_lasts_until_the_device_is_done(
    device: Timed, file: Path, on: bool, ready: bool
) -> None:
    """The probe adds no wait, whether the overlay's readbacks are on or off."""
    if ready:
        device.decide = lambda count: count - 1
    methods._wrap(OverlaidRunner, "_shown", methods._to_list)
    runner = OverlaidRunner() if on else upstreams_runner()
    for step in (1, 2, 3):
        recorder.recorder().begin_step(CONFIG, 1)
        before = time.perf_counter_ns()
        assert runner._to_list(torch.tensor([[5], [7]]).as_subclass(OnDevice)) == [[5], [7]]
        after = time.perf_counter_ns()
        owners = [span.owner for span in recorded(file, "fence")]
        assert owners == ([] if ready else ["output" if on else "_to_list"] * step)
        copies = recorded(file, "readback")
        assert [span.step for span in copies] == [*range(1, step + 1)]
        copied = copies[-1]
        assert before <= copied.began <= copied.ended <= copied.consumed <= after
        if owners:
            assert copied.ended == copied.consumed <= recorded(file, "fence")[-1].ended
    # Upstream's code waits for an event whether or not it has completed.
    assert device.waits == (0 if ready and on else 3)
    # The overlay's ids, which are on the host already, are not timed once more.
    assert runner.transfer_event.timing == (not on)


@pytest.mark.usefixtures("device")
def test_a_wait_for_the_whole_device_is_a_fence(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    recorder.recorder().begin_step(CONFIG, 1)
    GPUModelRunner.__new__(GPUModelRunner)._sync_device()
    assert [span.owner for span in recorded(file, "fence")] == ["_sync_device"]
    observed: Any = GPUModelRunner.execute_model
    assert observed.__name__ == observed.__wrapped__.__name__ == "execute_model"
    assert not hasattr(observed.__wrapped__, "_readiness_wrapped_by")
