"""The sync guard: report a step that waits for the device, with the stack that waits.

A sync that was added by accident breaks nothing. It costs throughput, and nobody notices.
With ``VLLM_READINESS_SYNC_GUARD`` set, a model runner's ``execute_model`` and
``sample_tokens`` run under torch's CUDA sync debug mode. ``warn`` logs each stack that waits,
once; ``error`` raises. If it is unset, nothing is installed, neither here nor in torch.

torch's mode misses some waits. These are observed by wrapping the functions that Python
calls: ``torch.cuda.synchronize`` and ``torch.accelerator.synchronize`` (called through their
modules), and non-blocking copies to the host by ``Tensor.copy_`` and ``Tensor.to`` that block
nevertheless. Outside of a step a wrapper only reads a thread-local flag.

The waits of torch.compile when it compiles a function are not reported: they cannot be
avoided, and occur once.

Still missed are

- ``Event.synchronize``, on purpose: it is how the overlay waits, and a fence has an owner;
- a non-blocking copy of more than 64 KiB from pageable memory to the device;
- a wait in a C++ extension that does not go through torch, or in ``torch.distributed``;
- a wait in an operator that is called through ``torch.ops``: torch's warning goes to stderr;
- a wait while another filter silences Python's warnings.

torch's mode belongs to the process, not to a thread (vLLM issue 51455). So it is ``warn`` while
any thread is in a step, under either word, and each warning is judged in the thread that waits:
there a step's wait is logged or raised, after it was waited; one in another thread is treated by
the mode that the process had before.
"""

# mirrors: nothing

import inspect
import os
import threading
import traceback
import warnings
from collections.abc import Callable
from functools import partial

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.readiness.engine import switch
from vllm.v1.readiness.watch.wrapping import wrap_once

logger = init_logger(__name__)

Function = Callable[..., object]

#: The guarded methods of a runner; together they are a step.
FUNCTIONS = ("execute_model", "sample_tokens")

#: How torch's warning begins.
_SYNC = "called a synchronizing CUDA operation"
#: torch's number of the mode that raises.
_ERROR = 2
#: How torch's warning about the mode itself begins.
_PROTOTYPE = "Synchronization debug mode is a prototype feature"
#: The code that benchmarks kernels at their first launch, which torch does not announce.
_AUTOTUNERS = tuple(
    os.path.join(*path)
    for path in (("torch", "_inductor", "runtime", ""), ("triton", "runtime", "autotuner.py"))
)


class DeviceSyncError(RuntimeError):
    """A step waited for the device, or was about to.

    Attributes:
        function: the model runner's method.
        operation: the operation that waits, as far as it is known.
    """

    def __init__(self, function: str, operation: str) -> None:
        super().__init__(function, operation)
        self.function = function
        self.operation = operation

    def __str__(self) -> str:
        return (
            f"{self.function} waits for the device: {self.operation}. The traceback says where. "
            f"Keep the value on the device, or read it back later, through pinned memory and an "
            f"event. {switch.SYNC_GUARD}=warn lists every such place; unset it to go on."
        )


class _Step(threading.local):
    """The guarded method that the current thread is in.

    Attributes:
        function: the model runner's method; empty outside of a step.
        word: ``warn`` or ``error``.
        compiling: whether torch.compile is compiling within the step, and waits are ignored.
    """

    function = ""
    word = ""
    compiling = False


def _wrap(owner: object, name: str, wrapper: Callable[[Function], Function]) -> None:
    wrap_once(owner, name, wrapper, by=__name__)


class _Mode:
    """torch's sync debug mode: ``warn`` while any thread is in a step.

    The mode that the process had comes back when the last step returns.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps = 0
        self._before = 0

    @property
    def own(self) -> int:
        """The mode that the process has without us: 0, 1 or 2, for nothing, warn or error."""
        with self._lock:
            return self._before if self._steps else torch.cuda.get_sync_debug_mode()

    def enter(self) -> None:
        """Begin a step, in any thread."""
        with self._lock:
            if not self._steps:
                self._before = torch.cuda.get_sync_debug_mode()
                torch.cuda.set_sync_debug_mode("warn")
            self._steps += 1

    def leave(self) -> None:
        """End a step."""
        with self._lock:
            self._steps -= 1
            if not self._steps:
                torch.cuda.set_sync_debug_mode(self._before)


_step = _Step()
_mode = _Mode()
#: The stacks that have been logged.
_reported: set[str] = set()


def install(runner: object) -> None:
    """Guard the steps of ``runner`` if VLLM_READINESS_SYNC_GUARD asks for it.

    Args:
        runner: an object with the methods of :data:`FUNCTIONS`, which are wrapped on this
            instance.

    Raises:
        SwitchError: the variable holds an unknown word.
    """
    word = switch.sync_guard()
    if word == "off":
        return
    if not (current_platform.is_cuda_alike() and torch.cuda.is_available()):
        logger.warning_once(
            "%s=%s: there is no CUDA device, and nothing to guard", switch.SYNC_GUARD, word
        )
        return
    warnings.filterwarnings("ignore", message=_PROTOTYPE)
    warnings.filterwarnings("always", message=_SYNC)
    _wrap(warnings, "showwarning", _show_warning)
    _exempt_compilation()
    _wrap(torch.cuda, "synchronize", partial(_synchronize, name="torch.cuda.synchronize"))
    _wrap(
        *(torch.accelerator, "synchronize"),
        partial(_synchronize, name="torch.accelerator.synchronize"),
    )
    _wrap(torch.Tensor, "copy_", _copy)
    _wrap(torch.Tensor, "to", _to)
    for name in FUNCTIONS:
        _wrap(runner, name, partial(_guarded, name=name, word=word))
    logger.info_once(
        "Sync guard on (%s=%s): it reports each wait for the device in %s",
        *(switch.SYNC_GUARD, word, " and ".join(FUNCTIONS)),
    )


def _guarded(function: Function, name: str, word: str) -> Function:
    """Wrap ``function``: set torch's mode and this thread's flag until it returns."""

    def guarded(*args: object, **kwargs: object) -> object:
        if kwargs.get("dummy_run"):  # runner V2 profiles and warms up by steps
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
    """Register callbacks for the begin and the end of a compilation."""
    from torch._dynamo.callback import callback_handler  # slow to import

    if _on_compile_start not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_on_compile_start)
        callback_handler.register_end_callback(_on_compile_end)


def _on_compile_start(_: object) -> None:
    _step.compiling = bool(_step.function)


def _on_compile_end(_: object) -> None:
    _step.compiling = False


def _report(operation: str) -> None:
    """Raise, or log the stack unless it has been logged: this thread is in a step.

    Raises:
        DeviceSyncError: this thread's step runs under ``error``.
    """
    if _step.compiling or _is_autotuning():
        return
    if _step.word == "error":
        raise DeviceSyncError(_step.function, operation)
    stack = _stack()
    if stack not in _reported:
        _reported.add(stack)
        logger.warning("%s waits for the device: %s\n%s", _step.function, operation, stack)


def _is_autotuning() -> bool:
    """Whether this thread is benchmarking a compiled kernel."""
    frame = inspect.currentframe()
    while frame is not None:
        if any(part in frame.f_code.co_filename for part in _AUTOTUNERS):
            return True
        frame = frame.f_back
    return False


def _stack() -> str:
    """Format this thread's stack from the step on, without the guard's own frames."""
    frames = traceback.extract_stack()
    own = [index for index, frame in enumerate(frames) if frame.filename == __file__]
    # The outermost of them is the wrapper of the step.
    shown = [frame for index, frame in enumerate(frames) if index > own[0] and index not in own]
    return "".join(traceback.format_list(shown)).rstrip()


def _show_warning(original: Function) -> Function:
    """Report torch's warnings of a step's wait; show the others as before.

    Raises:
        RuntimeError: the process itself has torch's mode ``error``, and this thread, in no step,
            waits.
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
    """Report a wait for a whole device."""

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
                _report("Tensor.copy_, though non_blocking")
        return original(self, *args, **kwargs)

    return copy_


def _to(original: Function) -> Function:
    def to(self: torch.Tensor, *args: object, **kwargs: object) -> object:
        result = original(self, *args, **kwargs)
        # It allocates its destination itself, which is the result.
        if _step.function and _non_blocking(args, kwargs) and _blocks(result, self):
            _report("Tensor.to, though non_blocking")
        return result

    return to


def _non_blocking(args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Whether a copy was asked not to block; torch's mode reports the others."""
    return bool(kwargs.get("non_blocking")) or any(arg is True for arg in args)


def _blocks(destination: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a non-blocking copy to the host blocks nevertheless.

    It does if ``destination`` is pageable, or if either side is not one contiguous piece:
    then torch copies through a temporary, which is pageable.
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
