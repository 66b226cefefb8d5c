"""The feature rope-positions: real steps send the positions that stock sends, without a wait."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from support import modules
from support.asynchronous import cycling
from support.device import Device, installed
from support.hybrid import HybridRunner
from vllm.v1.readiness.inputs import rope_positions
from vllm.v1.utils import CpuGpuBuffer

FIX = "rope-positions"
WIDTH = 97
KINDS = {"mrope": 3, "xdrope": 4}


@contextmanager
def sent(
    load: Any,
    kind: str,
    asynchronous: bool = True,
    pinned: bool = True,
    staged: int = 0,
) -> Iterator[tuple[torch.Tensor, Device]]:
    """The positions on the device after a step of four tokens, and the simulated device.

    Args:
        load: modules.pristine or modules.overlaid.
        kind: of positions.
        asynchronous: the schedule.
        pinned: whether memory is pinned.
        staged: bytes of positions that are left to upstream.
    """
    dimensions = KINDS[kind]
    size = mock.patch.object(rope_positions, "_STAGED", staged)
    with installed(Device(cycling([]))) as device, size:
        run = HybridRunner(load, asynchronous)
        cpu = torch.device("cpu")
        buffer = CpuGpuBuffer(dimensions, WIDTH, dtype=torch.int64, device=cpu, pin_memory=False)
        if pinned:
            memory = device.allocate(buffer.cpu.nbytes).view(torch.int64)
            buffer.cpu = memory.view(dimensions, WIDTH).zero_()
            buffer.np = buffer.cpu.numpy()

        def calculate(_: object) -> None:
            buffer.np[:, :4] = torch.arange(4) + 100 * torch.arange(dimensions)[:, None]

        vars(run.runner).update(
            {
                "pin_memory": pinned,
                "uses_mrope": kind == "mrope",
                "uses_xdrope_dim": dimensions if kind == "xdrope" else 0,
                f"{kind}_positions": buffer,
                f"_init_{kind}_positions": lambda _: None,
                f"_calc_{kind}_positions": calculate,
            }
        )
        run.step({"a": 0})
        run.step({"a": 0, "b": 0})
        device.default.finish()
        yield buffer.gpu, device


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pinned", [True, False])
def test_the_positions_are_stocks_and_the_host_does_not_wait(
    side: str, pinned: bool, kind: str, asynchronous: bool
) -> None:
    """With pinned memory and without."""
    with sent(modules.pristine, kind, asynchronous, pinned) as (theirs, _):
        assert theirs.any()
    with sent(modules.of_side(side), kind, asynchronous, pinned) as (positions, device):
        assert device.stream_waits == (0 if side == "ours" or not pinned else 2)
        assert device.rewritten == 0
    assert torch.equal(positions, theirs)


def test_few_positions_are_left_to_upstream() -> None:
    few = KINDS["mrope"] * 4 * torch.int64.itemsize
    with sent(modules.overlaid, "mrope", staged=few) as (_, device):
        assert device.stream_waits == 2
    with sent(modules.overlaid, "mrope", staged=few - 1) as (_, device):
        assert device.stream_waits < 2
