"""Launches of Triton's kernels, noted while a function runs, and repeated with other addresses.

For each launch Triton binds and specializes some 40 arguments, computes heuristics, looks up the
autotuner's choice, and assembles the key of the compiled kernel. A launch that was noted has the
outcome of all that. It is repeated by calling the compiled kernel, with ints for pointers.
"""

# mirrors: nothing

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, NamedTuple

import torch

#: Version of Triton whose launches are known, that of vLLM 0.22.0's PyTorch.
_TRITON = "3.6."


class Launch(NamedTuple):
    """A launch that Triton has made.

    Attributes:
        name: of the kernel.
        run: launches compiled kernels of this signature.
        grid: numbers of programs, three.
        kernel: Triton's compiled kernel.
    """

    name: str
    run: Callable[..., None]
    grid: tuple[int, int, int]
    kernel: Any

    def repeat(self, stream: int, values: Sequence[Any]) -> None:
        """Launch the kernel again, with addresses for the tensors."""
        self.run(
            *self.grid,
            stream,
            self.kernel.function,
            self.kernel.packed_metadata,
            *(None, None, None),  # metadata for hooks, and the hooks
            *values,
        )


class Note(NamedTuple):
    """A launch, and its arguments by parameter, in the kernel's order."""

    launch: Launch
    arguments: dict[str, Any]


class _Thread(threading.local):
    """Launches that a thread has noted; None while it notes none."""

    notes: list[Note | None] | None = None


_thread = _Thread()
_lock = threading.Lock()


@contextmanager
def noting() -> Iterator[list[Note | None]]:
    """Note the launches of this thread, in order; None for one that is not to be repeated."""
    notes: list[Note | None] = []
    with _lock:
        watching = _watch()
    if watching:
        _thread.notes = notes
    try:
        yield notes
    finally:
        _thread.notes = None


@cache
def _watch() -> bool:
    """Have Triton's launches pass by here; False if its launches are not known."""
    if torch.version.hip is not None or not torch.cuda.is_available():
        return False
    import triton
    from triton.runtime.jit import JITFunction

    if not triton.__version__.startswith(_TRITON):
        return False
    JITFunction.run = noted(JITFunction.run)
    return True


def noted(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return Triton's ``JITFunction.run``, which notes launches."""
    from triton import knobs

    @wraps(run)
    def run_and_note(function: Any, /, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        notes = _thread.notes
        if notes is None or warmup:
            return run(function, *args, grid=grid, warmup=warmup, **named)
        bound: dict[str, Any] = {}
        size: tuple[int, ...] = ()

        def noted_grid(parameters: dict[str, Any]) -> tuple[int, ...]:
            nonlocal bound, size
            size = tuple(grid(parameters)) if callable(grid) else tuple(grid)
            bound = parameters  # after the grid, which may replace arguments
            return size

        kernel = run(function, *args, grid=noted_grid, warmup=warmup, **named)
        hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        watched = function.pre_run_hooks or any(getattr(hook, "calls", hook) for hook in hooks)
        first, second, third = (*size, 1, 1)[:3]
        launch = Launch(function.__name__, kernel.run, (first, second, third), kernel)
        notes.append(None if watched or not _is_plain(bound) else Note(launch, bound))
        return kernel

    return run_and_note


def _is_plain(arguments: dict[str, Any]) -> bool:
    """Return whether no argument but tensors can have an address in it."""
    from triton.language import constexpr, dtype

    plain = (torch.Tensor, int, float, str, type(None), torch.dtype, constexpr, dtype)
    return all(isinstance(value, plain) for value in arguments.values())
