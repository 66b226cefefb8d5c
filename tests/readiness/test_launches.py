"""Launches of Triton's kernels are noted for those who ask, and only what can be repeated."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.readiness.layers import launches


class Function:
    """Stands for a kernel of Triton with its launches noted.

    Attributes:
        runs: what compiled kernels were called with.
    """

    __name__ = "kernel"

    def __init__(self) -> None:
        self.pre_run_hooks: list[Any] = []
        self.runs: list[tuple[Any, ...]] = []

    def launch(self, *, grid: Any = (3,), warmup: bool = False, **named: Any) -> Any:
        def run(self: Function, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
            assert not args
            size = grid(named) if callable(grid) else grid
            compiled = SimpleNamespace(run=record, function="f", packed_metadata="m")
            if not warmup:
                compiled.run(*size, 1, 1, 7, "f", "m", "data", "enter", "exit", *named.values())
            return compiled

        def record(*values: Any) -> None:
            self.runs.append(values)

        return launches.noted(run)(self, grid=grid, warmup=warmup, **named)


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "_watch", lambda: True)


@pytest.fixture
def function() -> Iterator[Function]:
    yield Function()


def test_a_noted_launch_is_repeated_with_addresses(function: Function) -> None:
    x, y = torch.zeros(4), torch.zeros(4)

    def grid(parameters: dict[str, Any]) -> tuple[int, int]:
        parameters["y"] = y  # as upstream's convolution does
        return 2, parameters["size"]

    with launches.noting() as notes:
        function.launch(grid=grid, x=x, size=5, y=None, scale=0.5)
    (note,) = notes
    assert note is not None
    launch, arguments = note
    assert (launch.name, launch.grid) == ("kernel", (2, 5, 1))
    assert [*arguments] == ["x", "size", "y", "scale"]
    assert (arguments["x"], arguments["y"]) == (x, y)
    launch.repeat(9, [11, 5, 12, 0.5])
    assert function.runs[-1] == (2, 5, 1, 9, "f", "m", None, None, None, 11, 5, 12, 0.5)


@pytest.mark.parametrize("value", [(torch.zeros(1),), SimpleNamespace(base=torch.zeros(1))])
def test_an_argument_that_may_hold_an_address_is_not_repeated(
    value: object, function: Function
) -> None:
    with launches.noting() as notes:
        function.launch(x=value)
    assert notes == [None]


def test_a_hooked_kernel_is_not_repeated(function: Function) -> None:
    function.pre_run_hooks.append(print)
    with launches.noting() as notes:
        function.launch(x=1)
    assert notes == [None]


def test_only_launches_of_this_thread_are_noted(function: Function) -> None:
    with launches.noting() as notes:
        other = threading.Thread(target=function.launch, kwargs={"x": 1})
        other.start()
        other.join()
        function.launch(warmup=True, x=1)
        assert notes == []
        function.launch(x=2)
    function.launch(x=3)
    assert len(notes) == 1


def test_an_error_ends_the_noting(function: Function) -> None:
    with pytest.raises(ZeroDivisionError), launches.noting() as notes:
        function.launch(x=1 // 0)
    function.launch(x=1)
    assert notes == []


def test_nothing_is_noted_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    function = Function()
    with launches.noting() as notes:
        function.launch(x=1)
    assert notes == []
