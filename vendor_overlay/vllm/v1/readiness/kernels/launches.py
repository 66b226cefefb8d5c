"""Feature ``mamba-launches``: launch kernels of Mamba layers without repeating Triton's own work.

For each launch Triton binds and specializes some 40 arguments, computes heuristics, looks up the
autotuner's choice, and assembles the key of the compiled kernel. A step with a prompt of a hybrid
model launches six kernels in each Mamba 2 layer, and eight if it has decodes, so that the host
takes longer than the device. But the arguments are those of the step's first layer, apart from the
addresses of tensors. Here a launch whose other arguments equal those of an earlier launch goes
directly to the kernel that Triton has chosen for that one. Every other launch is Triton's own.
Triton's options, such as ``knobs.runtime.debug``, are those of the time when a launch was new.
What needs no work of the host for its arguments either: :mod:`.mamba_layers`.
(https://github.com/vllm-project/vllm/pull/34838)
"""

# mirrors: vllm.model_executor.layers.mamba.ops.causal_conv1d:causal_conv1d_fn
# mirrors: vllm.model_executor.layers.mamba.ops.causal_conv1d:causal_conv1d_update
# mirrors: vllm.model_executor.layers.mamba.ops.mamba_ssm:selective_state_update
# mirrors: vllm.model_executor.layers.mamba.ops.ssd_bmm:_bmm_chunk_fwd
# mirrors: vllm.model_executor.layers.mamba.ops.ssd_chunk_scan:_chunk_scan_fwd
# mirrors: vllm.model_executor.layers.mamba.ops.ssd_chunk_state:_chunk_cumsum_fwd
# mirrors: vllm.model_executor.layers.mamba.ops.ssd_chunk_state:_chunk_state_fwd
# mirrors: vllm.model_executor.layers.mamba.ops.ssd_state_passing:_state_passing_fwd

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch

#: Version of Triton whose launches are known, that of vLLM 0.22.0's PyTorch.
_TRITON = "3.6."
#: Most launches that are remembered of a kernel. Nearly each step with a prompt has new ones.
_MOST = 64
#: Tokens of a prompt that one program of the convolution works on.
_TOKENS = 8
#: Kernel, by its id, to its launcher, or to itself if Triton is to launch it.
_launchers: dict[int, Any] = {}
#: Where launches are noted: one list, or none.
_notes: list[list["Note | None"]] = []


def of(kernel: Any) -> Any:
    """Return what launches a kernel of Triton, by ``[grid](*arguments)``.

    A kernel has one call of this, with the same names of arguments each time. ``grid`` is a
    function whose result depends on its closure and on the arguments. Numbers in both are ints:
    floats of the same value can differ in their sign.
    """
    if registry.MAMBA_LAUNCHES not in switch.enabled():
        return kernel
    launcher = _launchers.get(id(kernel))
    if launcher is None:
        function = _function(kernel)
        launcher = kernel if function is None else Launcher(kernel, function)
        _launchers[id(kernel)] = launcher
    return launcher


def of_prompts(kernel: Any, metadata: Any, grid: Callable[..., Any], width: int) -> Any:
    """Return what launches the convolution of prompts, by ``(*arguments)``.

    Args:
        kernel: of Triton.
        metadata: the step's, which has numbers of programs and what each works on; None if
            ``grid`` is to compute them.
        grid: upstream's function. Its closure cannot be compared, and it puts the metadata's
            tensors among the arguments, where they already are.
        width: of the convolution, in channels.
    """
    launcher = of(kernel)
    sizes = None if metadata is None else metadata.nums_dict
    if (
        launcher is kernel
        or not sizes
        or [*sizes] != [_TOKENS]
        or sizes[_TOKENS]["batch_ptr"] is not metadata.batch_ptr
    ):
        return kernel[grid]
    programs = sizes[_TOKENS]["tot"]
    return launcher[lambda given: (programs, -(-width // given["BLOCK_N"]))]


@contextmanager
def noting() -> Iterator[list["Note | None"]]:
    """Note the launches that are made meanwhile; None for one that is not to be repeated."""
    notes: list[Note | None] = []
    _notes.append(notes)
    try:
        yield notes
    finally:
        _notes.pop()


class Launch(NamedTuple):
    """A launch that Triton has made.

    Attributes:
        name: of the kernel.
        run: launches compiled kernels of this signature.
        grid: numbers of programs, three.
        kernel: Triton's compiled kernel.
        parameters: names.
        values: one for each parameter, in order.
        places: indices in ``values`` of the tensors.
    """

    name: str
    run: Callable[..., None]
    grid: tuple[int, int, int]
    kernel: Any
    parameters: list[str]
    values: list[Any]
    places: list[int]

    def repeat(self, stream: int, values: list[Any]) -> None:
        """Launch the kernel again, with tensors or addresses for the tensors."""
        self.run(
            *self.grid,
            stream,
            self.kernel.function,
            self.kernel.packed_metadata,
            *(None, None, None),  # metadata for hooks, and the hooks
            *values,
        )


class Note(NamedTuple):
    """A launch and its tensors, in the order of its ``places``."""

    launch: Launch
    tensors: list[torch.Tensor]


class Launcher:
    """Launches of one kernel.

    Args:
        kernel: of Triton, autotuned, with heuristics, or plain.
        function: Triton's function in it.
    """

    def __init__(self, kernel: Any, function: Any) -> None:
        from triton import knobs
        from triton.runtime import driver

        self._kernel, self._function = kernel, function
        self._driver, self._knobs = driver, knobs.runtime
        #: Arguments that have been tensors, by index.
        self._tensors: tuple[int, ...] = ()
        self._launches: dict[tuple[Any, ...], Launch] = {}

    def __getitem__(self, grid: Callable[..., Any]) -> Callable[..., None]:
        """Return a function that launches the kernel with its arguments."""
        return partial(self._launch, grid)

    def _launch(self, grid: Callable[..., Any], *args: Any, **named: Any) -> None:
        if self._is_watched():
            self._kernel[grid](*args, **named)
            _note(None, [])
            return
        values = [*args, *named.values()]
        tensors, known = [], self._tensors
        for index in known:
            tensor = values[index]
            if isinstance(tensor, torch.Tensor):
                tensors.append(tensor)
                # Triton compiles a kernel for aligned addresses, and one for others.
                aligned = not tensor.data_ptr() % 16
                values[index] = tensor.dtype if aligned else (tensor.dtype,)
        active = self._driver.active
        device = active.get_current_device()
        closure = [cell.cell_contents for cell in grid.__closure__ or ()]
        key = (device, grid.__code__, *closure, *values)
        launch = self._launches.get(key)
        if launch is None:
            _note(self._learn(key, known, grid, args, named), tensors)
            return
        values = launch.values.copy()
        for index, tensor in zip(launch.places, tensors, strict=True):
            values[index] = tensor
        launch.repeat(active.get_current_stream(device), values)
        _note(launch, tensors)

    def _is_watched(self) -> bool:
        """Return whether other code is to be called around each launch, such as a profiler."""
        enter, leave = self._knobs.launch_enter_hook, self._knobs.launch_exit_hook
        return bool(
            getattr(enter, "calls", enter)
            or getattr(leave, "calls", leave)
            or self._function.pre_run_hooks
        )

    def _learn(
        self,
        key: tuple[Any, ...],
        known: tuple[int, ...],
        grid: Callable[..., Any],
        args: tuple[Any, ...],
        named: dict[str, Any],
    ) -> Launch | None:
        """Let Triton launch the kernel, and remember the launch; None if it cannot be repeated.

        ``known`` are the arguments that ``key`` compares as tensors.
        """
        bound: dict[str, Any] = {}
        size: tuple[int, ...] = ()

        def noted(parameters: dict[str, Any]) -> tuple[int, ...]:
            nonlocal bound, size
            bound, size = parameters.copy(), tuple(grid(parameters))
            return size

        kernel = self._kernel[noted](*args, **named)
        given = [*args, *named.values()]
        tensors = {i for i, value in enumerate(given) if isinstance(value, torch.Tensor)}
        if not tensors.issubset(known):
            self._tensors = tuple(sorted(tensors.union(known)))
            return None  # the key has a tensor in it
        if not bound or not hasattr(kernel, "packed_metadata"):
            return None
        parameters = [*bound]
        names = [*parameters[: len(args)], *named]
        if len(self._launches) >= _MOST:
            self._launches.clear()
        values = [None if isinstance(value, torch.Tensor) else value for value in bound.values()]
        places = [parameters.index(names[index]) for index in sorted(tensors)]
        first, second, third = (*size, 1, 1)[:3]
        launch = self._launches[key] = Launch(
            self._function.__name__,
            kernel.run,
            (first, second, third),
            kernel,
            parameters,
            values,
            places,
        )
        return launch


def _note(launch: Launch | None, tensors: list[torch.Tensor]) -> None:
    for notes in _notes:
        notes.append(None if launch is None else Note(launch, tensors))


def _function(kernel: Any) -> Any:
    """Return Triton's function in a kernel; None if :class:`Launcher` does not compare enough."""
    if torch.version.hip is not None or not torch.cuda.is_available():
        return None
    import triton
    from triton.runtime.autotuner import Autotuner, Heuristics
    from triton.runtime.jit import JITFunction

    while type(kernel) in (Autotuner, Heuristics):
        if any(config.pre_hook for config in getattr(kernel, "configs", ())):
            return None
        kernel = kernel.fn
    known = type(kernel) is JITFunction and triton.__version__.startswith(_TRITON)
    return kernel if known else None
