"""Sync guard: report steps that sync with the device, with a stack trace.

With ``VLLM_READINESS_SYNC_GUARD`` set, a model runner's ``execute_model`` and ``sample_tokens`` run
under torch's CUDA sync debug mode. ``warn`` logs each waiting stack once; ``error`` raises.

torch's mode misses some waits. So the guard also wraps ``torch.cuda.synchronize`` and
``torch.accelerator.synchronize`` (as attributes of their modules), and ``Tensor.copy_`` and
``Tensor.to``, whose non-blocking copies to the host may block. Outside of a step, the wrappers only
read a thread-local flag. The guard does not report

- waits during a compilation by torch.compile, which occur once;
- ``Event.synchronize``, which the overlay's fences call;
- non-blocking copies of more than 64 KiB from pageable memory to the device;
- waits in C++ extensions that bypass torch, and in ``torch.distributed``;
- waits in operators called through ``torch.ops``: torch's warning goes to stderr;
- waits while another filter silences Python's warnings.

torch's mode is per process, not per thread (vLLM issue 51455). The mode is ``warn`` while any
thread is in a step. The waiting thread handles its own warnings: in a step the guard logs or raises
after the wait, elsewhere the previous mode of the process applies.
"""

# mirrors: nothing

import inspect
import os
import threading
import traceback
import warnings
from functools import partial

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.readiness.engine import switch
from vllm.v1.readiness.watch.wrapping import Function, wrap_once

logger = init_logger(__name__)

#: Guarded methods of a runner. Together they are a step.
FUNCTIONS = ("execute_model", "sample_tokens")
#: Prefix of torch's warning about a wait.
_SYNC = "called a synchronizing CUDA operation"
#: Numeric value of torch's mode ``error``.
_ERROR = 2
#: Prefix of torch's warning about the mode itself.
_PROTOTYPE = "Synchronization debug mode is a prototype feature"
#: Code that benchmarks kernels at their first launch, outside of torch's compile callbacks.
_AUTOTUNERS = tuple(
    os.path.join(*path)
    for path in (("torch", "_inductor", "runtime", ""), ("triton", "runtime", "autotuner.py"))
)


class DeviceSyncError(RuntimeError):
    """A step waits for the device in runner method ``function``, because of ``operation``."""

    def __init__(self, function: str, operation: str) -> None:
        super().__init__(function, operation)
        self.function, self.operation = function, operation

    def __str__(self) -> str:
        return (
            f"{self.function} waits for the device: {self.operation}. See the traceback. Keep the "
            f"value on the device, or read it back later through pinned memory and an event. "
            f"{switch.SYNC_GUARD}=warn lists every such place; unset it to continue."
        )


class _Step(threading.local):
    """State of this thread: guarded method, the guard's mode, and whether to ignore waits."""

    function, word, compiling = "", "", False


class _Mode:
    """torch's sync debug mode: ``warn`` while any thread is in a step, then restored."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps = self._before = 0

    @property
    def own(self) -> int:
        """Torch's mode without the guard: 0, 1 or 2 for default, warn or error."""
        with self._lock:
            return self._before if self._steps else torch.cuda.get_sync_debug_mode()

    def enter(self) -> None:
        with self._lock:
            if not self._steps:
                self._before = torch.cuda.get_sync_debug_mode()
                torch.cuda.set_sync_debug_mode("warn")
            self._steps += 1

    def leave(self) -> None:
        with self._lock:
            self._steps -= 1
            if not self._steps:
                torch.cuda.set_sync_debug_mode(self._before)


_step = _Step()
_mode = _Mode()
_wrap = partial(wrap_once, by=__name__)
_reported: set[str] = set()


def install(runner: object) -> None:
    """Wrap the runner methods in :data:`FUNCTIONS` if VLLM_READINESS_SYNC_GUARD is set.

    Raises:
        SwitchError: the variable holds an unknown word.
    """
    word = switch.sync_guard()
    if word == "off":
        return
    if not (current_platform.is_cuda_alike() and torch.cuda.is_available()):
        logger.warning_once("%s=%s: no CUDA device, nothing to guard", switch.SYNC_GUARD, word)
        return
    warnings.filterwarnings("ignore", message=_PROTOTYPE)
    warnings.filterwarnings("always", message=_SYNC)
    _wrap(warnings, "showwarning", _show_warning)
    _exempt_compilation()
    for module in (torch.cuda, torch.accelerator):
        name = f"{module.__name__}.synchronize"
        _wrap(module, "synchronize", partial(_synchronize, name=name))
    _wrap(torch.Tensor, "copy_", _copy)
    _wrap(torch.Tensor, "to", _to)
    for name in FUNCTIONS:
        _wrap(runner, name, partial(_guarded, name=name, word=word))
    logger.info_once(
        "Sync guard on (%s=%s): reporting each wait for the device in %s",
        *(switch.SYNC_GUARD, word, " and ".join(FUNCTIONS)),
    )


def _guarded(function: Function, name: str, word: str) -> Function:
    def guarded(*args: object, **kwargs: object) -> object:
        if kwargs.get("dummy_run"):  # runner V2's profiling and warm-up
            return function(*args, **kwargs)
        outer = _step.function, _step.word
        _exempt_compilation()  # torch._dynamo.reset() drops callbacks
        _mode.enter()
        _step.function, _step.word = name, word
        try:
            return function(*args, **kwargs)
        finally:
            _step.function, _step.word = outer
            _mode.leave()

    return guarded


def _exempt_compilation() -> None:
    """Register callbacks that make the guard ignore waits during a compilation."""
    from torch._dynamo.callback import callback_handler  # slow to import

    if _on_compile_start not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_on_compile_start)
        callback_handler.register_end_callback(_on_compile_end)


def _on_compile_start(_: object) -> None:
    _step.compiling = bool(_step.function)


def _on_compile_end(_: object) -> None:
    _step.compiling = False


def _report(operation: str) -> None:
    """Log a wait of this thread's step once per stack; raise DeviceSyncError in mode ``error``."""
    if _step.compiling or _is_autotuning():
        return
    if _step.word == "error":
        raise DeviceSyncError(_step.function, operation)
    stack = _stack()
    if stack not in _reported:
        _reported.add(stack)
        logger.warning("%s waits for the device: %s\n%s", _step.function, operation, stack)


def _is_autotuning() -> bool:
    frame = inspect.currentframe()
    while frame is not None:
        if any(part in frame.f_code.co_filename for part in _AUTOTUNERS):
            return True
        frame = frame.f_back
    return False


def _stack() -> str:
    """Format this thread's stack within the step, without the guard's own frames."""
    frames = traceback.extract_stack()
    own = [index for index, frame in enumerate(frames) if frame.filename == __file__]
    # The outermost own frame is the wrapper of the step.
    shown = [frame for index, frame in enumerate(frames) if index > own[0] and index not in own]
    return "".join(traceback.format_list(shown)).rstrip()


def _show_warning(original: Function) -> Function:
    """Report torch's warnings about waits in a step; show all other warnings as before.

    Outside of a step, the wrapper raises RuntimeError if the process set torch's mode to ``error``.
    """

    def showwarning(message: Warning | str, *args: object, **kwargs: object) -> None:
        if not str(message).startswith(_SYNC):
            original(message, *args, **kwargs)
        elif _step.function:
            _report(f"it {_SYNC}")
        elif (mode := _mode.own) == _ERROR:
            raise RuntimeError(str(message))
        elif mode:
            original(message, *args, **kwargs)

    return showwarning


def _synchronize(original: Function, name: str) -> Function:
    def synchronize(*args: object, **kwargs: object) -> object:
        if _step.function:
            _report(name)
        return original(*args, **kwargs)

    return synchronize


def _copy(original: Function) -> Function:
    def copy_(self: torch.Tensor, *args: object, **kwargs: object) -> object:
        if _step.function and _non_blocking(args, kwargs):
            source = args[0] if args else kwargs.get("other")
            if isinstance(source, torch.Tensor) and _blocks(self, source):
                _report("Tensor.copy_ with non_blocking=True")
        return original(self, *args, **kwargs)

    return copy_


def _to(original: Function) -> Function:
    def to(self: torch.Tensor, *args: object, **kwargs: object) -> object:
        result = original(self, *args, **kwargs)
        if _step.function and _non_blocking(args, kwargs) and _blocks(result, self):
            _report("Tensor.to with non_blocking=True")
        return result

    return to


def _non_blocking(args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Return whether a copy is non-blocking. torch's mode reports blocking copies."""
    return bool(kwargs.get("non_blocking")) or any(arg is True for arg in args)


def _blocks(destination: torch.Tensor, source: torch.Tensor) -> bool:
    """Return whether a non-blocking copy to the host blocks nevertheless.

    A copy blocks if ``destination`` is pageable. It also blocks if the copy is not contiguous,
    because torch then copies through a pageable temporary.
    """
    if not source.is_cuda or destination.device.type != "cpu" or destination.numel() == 0:
        return False
    if not destination.is_pinned():
        return True
    if destination.is_contiguous():
        return False
    order = sorted(range(destination.dim()), key=destination.stride, reverse=True)
    return not (
        destination.dtype == source.dtype
        and destination.shape == source.shape
        and destination.permute(order).is_contiguous()
        and source.permute(order).is_contiguous()
    )
