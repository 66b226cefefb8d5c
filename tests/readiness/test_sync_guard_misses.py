"""Waits that torch's sync debug mode misses, and the guard reports.

Tensors that say ``is_cuda`` stand in for the device's.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from readiness.guard import Guard
from vllm.v1.readiness.watch.sync_guard import DeviceSyncError

Copy = Callable[[], Any]


@pytest.mark.parametrize("owner", [torch.cuda, torch.accelerator], ids=["cuda", "accelerator"])
def test_a_wait_for_a_whole_device_is_reported_inside_a_step_only(owner: Any, guard: Guard) -> None:
    def planted() -> Any:
        return owner.synchronize(3)

    lenient, strict = guard.installed("warn"), guard.installed("error")
    assert planted() == ("waited", 3)
    assert guard.reports() == []
    assert lenient.execute_model(planted) == ("waited", 3)
    (report,) = guard.reports()
    assert report.startswith(f"execute_model waits for the device: {owner.__name__}.synchronize\n")
    assert "in planted" in report
    with pytest.raises(DeviceSyncError, match=rf"{owner.__name__}\.synchronize"):
        strict.execute_model(planted)
    assert planted() == ("waited", 3)


class OnDevice(torch.Tensor):  # type: ignore[misc]
    """A source on the device; a destination of this type is on the host."""

    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl


class OnCuda(OnDevice):
    """A destination on the device, which has a device of its own."""

    device = torch.device("cuda")


class Pageable(torch.Tensor):  # type: ignore[misc]
    """Is not pinned; any other tensor here says that it is."""

    __torch_function__ = torch._C._disabled_torch_function_impl


def on_device(tensor: torch.Tensor) -> Any:
    return tensor.as_subclass(OnDevice)


def pageable(*shape: int) -> Any:
    return torch.zeros(shape).as_subclass(Pageable)


def copy(destination: torch.Tensor, source: torch.Tensor, *how: Any, **named: Any) -> Copy:
    """Return a copy from the device, non-blocking unless that is given."""
    named = named if how or named else {"non_blocking": True}
    return lambda: destination.copy_(on_device(source), *how, **named)


def cast(source: torch.Tensor, *how: Any, **named: Any) -> Copy:
    return lambda: on_device(source).to("cpu", *how, **named)


ROW, ROWS, COLUMNS = torch.ones(3), torch.ones(2, 3), torch.ones(3, 2).t()
DOUBLE: dict[str, Any] = {"dtype": torch.float64, "non_blocking": True}

#: Copies to the host that block though they are asked not to.
BLOCKING = {
    "into pageable memory": copy(pageable(3), ROW),
    "into part of each pinned row": copy(torch.zeros(2, 5)[:, :3], ROWS),
    "part of each row into the like": copy(torch.zeros(2, 5)[:, :3], torch.ones(2, 5)[:, :3]),
    "rows into columns": copy(torch.zeros(3, 2).t(), ROWS),
    "one row into columns": copy(torch.zeros(3, 2).t(), ROW),
    "columns into columns, converted": copy(torch.zeros(3, 2).t(), COLUMNS.double()),
    "columns cast and converted": cast(COLUMNS, **DOUBLE),
    "by position": copy(pageable(2, 3), ROWS, True),
    "by keyword": lambda: pageable(2, 3).copy_(other=on_device(ROWS), non_blocking=True),
    "cast by position": cast(COLUMNS, torch.float64, True),
}
#: Copies that do not, or that torch's own mode reports.
OTHERS = {
    "into pinned memory": copy(torch.zeros(3), ROW),
    "into pinned rows": copy(torch.zeros(4, 3)[1:3], ROWS),
    "columns into pinned rows, converted": copy(torch.zeros(2, 3), COLUMNS.double()),
    "columns into columns": copy(torch.zeros(3, 2).t(), COLUMNS),
    "nothing": copy(pageable(0), torch.ones(0)),
    "columns cast": cast(COLUMNS, non_blocking=True),
    "rows cast and converted": cast(ROWS, **DOUBLE),
    "columns cast and blocking": cast(COLUMNS, dtype=torch.float64),
    "blocking": copy(pageable(2, 3), ROWS, False),
    "host to host": lambda: pageable(2, 3).copy_(ROWS, non_blocking=True),
    "to the device": lambda: OnCuda(torch.zeros(2, 3)).copy_(pageable(2, 3), non_blocking=True),
    "on the device": copy(torch.zeros(3, 2).t().as_subclass(OnCuda), ROWS),
    "of a number": lambda: pageable(2, 3).copy_(3.0, non_blocking=True),
}


@pytest.mark.parametrize("name", [*BLOCKING, *OTHERS])
def test_a_copy_to_the_host_that_blocks_is_reported_inside_a_step_only(
    name: str, guard: Guard
) -> None:
    pinned = lambda tensor: not isinstance(tensor, Pageable)  # noqa: E731
    guard.patch.setattr(torch.Tensor, "is_pinned", pinned)
    copy = (BLOCKING | OTHERS)[name]
    lenient, strict = guard.installed("warn"), guard.installed("error")
    expected = copy()
    assert guard.reports() == []
    assert torch.equal(lenient.sample_tokens(copy), expected)
    blocks = name in BLOCKING
    assert ["with non_blocking=True" in report for report in guard.reports()] == [True] * blocks
    if not blocks:
        strict.sample_tokens(copy)
        return
    with pytest.raises(DeviceSyncError, match="with non_blocking=True"):
        strict.sample_tokens(copy)


def test_compiled_code_does_not_see_the_replacements(guard: Guard) -> None:
    """Else torch.compile would trace the guard, and compile again inside of a step."""
    runner = guard.installed("error")
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append([(node.op, node.target) for node in graph.graph.nodes])
        return graph.forward

    def model(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        out.copy_(x.to(torch.float64), non_blocking=True)
        return out + 1

    # It would look for the device that is not there.
    guard.patch.setattr(torch.cuda, "is_available", lambda: False)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x, out = torch.ones(3), torch.zeros(3)
    compiled(x, out)
    assert torch.equal(runner.execute_model(lambda: compiled(x, out)), torch.full((3,), 2.0))
    (graph,) = graphs
    assert [target for op, target in graph if op == "call_method"] == ["to", "copy_"]
