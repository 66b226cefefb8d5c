"""The fix pinned-inputs: a step's pinned inputs stay until the device has read them.

The device is a stand-in that comes to its copies only when it is waited for: on a CPU, copies do
not wait. Real is ``synchronize_input_prep``, which ``execute_model`` prepares inputs in. That each
rank of an engine has the event is in ``tests/engine/test_parallel.py``.
"""

import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from support import modules
from vllm.v1.readiness.engine import switch
from vllm.v1.readiness.inputs import pinned_inputs


class Device:
    """Copies what a pinned tensor holds, as late as it may."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self._waiting: list[torch.Tensor] = []

    def copy(self, pinned: torch.Tensor) -> None:
        """Copy it at some time."""
        self._waiting.append(pinned)

    def synchronize(self) -> None:
        """Come to all copies."""
        self.read += [int(pinned) for pinned in self._waiting]
        self._waiting = []

    def record(self) -> None:
        """Nothing is launched after it."""


def steps(value: str, stages: int, asynchronous: bool = False, pooling: bool = False) -> list[int]:
    """What the device reads in three steps, which fill one pinned tensor with their numbers."""
    device = Device()
    runner: Any = object.__new__(modules.overlaid(modules.RUNNER).GPUModelRunner)
    runner.prepare_inputs_event = device if asynchronous else None
    runner.is_pooling_model = pooling
    runner.parallel_config = SimpleNamespace(pipeline_parallel_size=stages)
    with (
        mock.patch.dict(os.environ, {switch.NAME: value}),
        mock.patch.object(torch, "Event", lambda: device),
    ):
        pinned_inputs.keep(runner)
    pinned = torch.zeros(())
    for number in range(3):
        with runner.synchronize_input_prep():
            pinned.fill_(number)
            device.copy(pinned)
    device.synchronize()
    return device.read


@pytest.mark.parametrize("value", ["on", "features,pinned-inputs"])
def test_each_step_of_a_pipeline_is_computed_with_its_own_inputs(value: str) -> None:
    assert steps("-fixes", 2) == steps("-pinned-inputs", 4) == [2, 2, 2]  # as on stock
    assert steps(value, 2) == steps(value, 4) == [0, 1, 2]


def test_each_step_of_a_pooling_model_is_computed_with_its_own_inputs() -> None:
    assert steps("-fixes", 1, pooling=True) == [2, 2, 2]
    assert steps("on", 1, pooling=True) == [0, 1, 2]


def test_asynchronous_scheduling_keeps_upstreams_event() -> None:
    assert steps("on", 2, asynchronous=True) == steps("-fixes", 2, asynchronous=True) == [0, 1, 2]


def test_one_stage_that_samples_has_no_event() -> None:
    """Where each step samples, it has been waited for."""
    assert steps("on", 1) == [2, 2, 2]
