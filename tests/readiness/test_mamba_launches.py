"""The feature mamba-launches: a launch is repeated only if the earlier one was the same.

Triton launches nothing without a GPU, so a kernel that records its launches stands for Triton's.
With real kernels: tests/gpu/test_mamba_launches.py.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.readiness.kernels import launches
from vllm.v1.readiness.kernels.launches import Launcher

PARAMETERS = ("x", "bias", "out", "length", "stride", "HAS_BIAS", "BLOCK")


class Kernel:
    """Stands for a kernel of Triton that was compiled for 32 programs in its first dimension.

    Attributes:
        launched: number of launches that Triton itself made.
        runs: stream, grid and values of each launch, whoever made it.
    """

    __name__ = "kernel"

    def __init__(self) -> None:
        self.pre_run_hooks: list[Callable[..., None]] = []
        self.launched = 0
        self.runs: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any, **named: Any) -> Any:
            bound = {**dict(zip(PARAMETERS, args, strict=False)), **named, "BLOCK": 32}
            bound = {name: bound[name] for name in PARAMETERS}
            self.launched += 1
            size = (*grid(bound), 1, 1)[:3]
            self.run(*size, 7, "function", "metadata", None, "enter", "exit", *bound.values())
            return SimpleNamespace(run=self.run, function="function", packed_metadata="metadata")

        return launch

    def run(self, *values: Any) -> None:
        """Record a launch, without the hooks that Triton passes."""
        *head, stream, function, metadata, data, _, _ = values[:9]
        assert (function, metadata, data) == ("function", "metadata", None)
        self.runs.append((stream, *head, *map(_shown, values[9:])))


def _shown(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


@pytest.fixture
def launcher(kernel: Kernel) -> Launcher:
    made = Launcher(kernel, kernel)
    made._driver = SimpleNamespace(
        active=SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 7,
        )
    )
    made._knobs = SimpleNamespace(
        launch_enter_hook=SimpleNamespace(calls=[]), launch_exit_hook=None
    )
    return made


def launch(
    by: Any,
    x: torch.Tensor,
    out: torch.Tensor,
    length: int = 5,
    bias: torch.Tensor | None = None,
    requests: int = 3,
) -> None:
    """Launch, as upstream's functions do: some arguments by name, and a grid with a closure."""
    grid = lambda META: (length // META["BLOCK"] + 1, requests)  # noqa: E731
    by[grid](x, bias, out=out, length=length, stride=x.stride(0), HAS_BIAS=bias is not None)


def tensors(count: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.zeros(64, dtype=dtype) for _ in range(count)]


def expected(each: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return what Triton would run for these arguments."""
    plain = Kernel()
    for arguments in each:
        launch(plain, *arguments)
    return plain.runs


def test_a_launch_that_differs_in_addresses_is_not_tritons(
    launcher: Launcher, kernel: Kernel
) -> None:
    given = [(*tensors(2), 5, *tensors(1)) for _ in range(6)]
    for arguments in given:
        launch(launcher, *arguments)
    assert kernel.runs == expected(given)
    assert kernel.launched == 2  # the first shows which arguments are tensors


@pytest.mark.parametrize(
    "other",
    [
        {"length": 40},
        {"requests": 4},
        {"bias": torch.zeros(64)},
        {"x": torch.zeros(64, dtype=torch.bfloat16)},
        {"x": torch.zeros(65)[1:]},
        {"x": torch.zeros(128)[::2]},
    ],
    ids=["argument", "closure", "tensor for none", "dtype", "alignment", "stride"],
)
def test_a_launch_that_differs_in_anything_else_is_tritons(
    other: dict[str, Any], launcher: Launcher, kernel: Kernel
) -> None:
    for _ in range(3):
        launch(launcher, *tensors(2))
    before = kernel.launched
    x, out = tensors(2)
    launch(launcher, **{"x": x, "out": out, **other})
    assert kernel.launched == before + 1
    assert kernel.runs[-1] != kernel.runs[-2]


def test_tensors_return_where_none_was(launcher: Launcher, kernel: Kernel) -> None:
    given = [(*tensors(2), 5, *(tensors(1) if place % 2 else ())) for place in range(8)]
    for arguments in given:
        launch(launcher, *arguments)
    assert kernel.runs == expected(given)
    assert kernel.launched == 4


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook", "pre_run_hooks"])
def test_a_hook_sees_each_launch(hook: str, launcher: Launcher, kernel: Kernel) -> None:
    for _ in range(3):
        launch(launcher, *tensors(2))
    before = kernel.launched
    if hook == "pre_run_hooks":
        kernel.pre_run_hooks.append(lambda *_, **__: None)
    else:
        setattr(launcher._knobs, hook, SimpleNamespace(calls=[print]))
    remembered = len(launcher._launches)
    x, out = tensors(2)
    launch(launcher, x, out)
    launch(launcher, x, out, 70)
    assert kernel.launched == before + 2
    assert len(launcher._launches) == remembered  # a profiler may have changed the kernel


def test_few_launches_are_remembered(launcher: Launcher, kernel: Kernel) -> None:
    x, out = tensors(2)
    for length in range(1000):
        launch(launcher, x, out, length)
    assert len(launcher._launches) <= 64
    assert kernel.launched == 1000
    launch(launcher, x, out, 999)
    assert kernel.launched == 1000


def test_triton_launches_without_a_gpu_or_with_the_feature_off(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launches.of(kernel) is kernel
    other = Kernel()
    monkeypatch.setattr(launches, "_function", lambda kernel: kernel)
    monkeypatch.setenv("VLLM_READINESS", "-mamba-launches")
    assert launches.of(other) is other
    monkeypatch.setenv("VLLM_READINESS", "on")
    assert isinstance(launches.of(other), Launcher)
