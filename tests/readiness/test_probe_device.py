"""The probe on upstream's own classes, with a simulated device."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from readiness.metrics import counts
from support.device import Device, installed
from vllm.v1.core.sched import scheduler
from vllm.v1.readiness.engine import fences
from vllm.v1.readiness.watch import probe, wrapping
from vllm.v1.readiness.watch.probe import methods
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu import async_utils
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


@pytest.fixture
def device(exported: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A device that is never ready, on which upstream's classes are observed."""
    assert exported
    monkeypatch.setattr(fences, "listeners", [])
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
        simulated = stack.enter_context(installed(Device(lambda _: 0)))
        before = [(owner, dict(vars(owner))) for owner in owners]
        for _ in range(2):  # a second time changes nothing
            probe.install()
        methods.state.worker, methods.state.step = "rank0", 1
        yield simulated
    for owner, attributes in before:
        for name, value in vars(owner).copy().items():
            if name in attributes and attributes[name] is not value:
                setattr(owner, name, attributes[name])


def v1_output(device: Device) -> Any:
    return gpu_model_runner.AsyncGPUModelRunnerOutput(
        model_runner_output=SimpleNamespace(sampled_token_ids=None, logprobs=None),
        sampled_token_ids=torch.tensor([[5], [7]]),
        logprobs_tensors=None,
        invalid_req_indices=[1],
        async_output_copy_stream=device.Stream(),
        vocab_size=10,
    )


def v2_output(device: Device) -> Any:
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
def test_an_asynchronous_output_is_a_wait_unless_it_is_ready(
    device: Device, output_of: Callable[[Device], Any], ready: bool
) -> None:
    output = output_of(device)
    if ready:
        for stream in device.streams:
            stream.finish()
    assert output.get_output().sampled_token_ids == [[5], []]
    waits = {} if ready else {("fence", "rank0", "get_output"): 1}
    assert counts() == {("get_output", "rank0", ""): 1, **waits}


@pytest.mark.usefixtures("device")
def test_waits_for_an_event_or_the_whole_device_are_fences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    runner = GPUModelRunner.__new__(GPUModelRunner)
    runner.sampled_token_ids_pinned_cpu = torch.zeros(4, 1, dtype=torch.int64)
    runner.transfer_event = torch.Event()
    assert runner._to_list(torch.tensor([[5], [7]])) == [[5], [7]]
    runner._sync_device()
    assert counts() == {("fence", "rank0", "_to_list"): 1, ("fence", "rank0", "_sync_device"): 1}
    observed: Any = GPUModelRunner.execute_model
    assert observed.__name__ == observed.__wrapped__.__name__ == "execute_model"
    assert not hasattr(observed.__wrapped__, "readiness")
