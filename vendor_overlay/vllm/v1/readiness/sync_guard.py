"""The sync guard: a step that waits for the device is named, with the stack that waits.

A sync added by accident breaks nothing; it costs throughput, and nobody notices. With
``VLLM_READINESS_SYNC_GUARD`` set, a model runner's ``execute_model`` and ``sample_tokens``
run under torch's CUDA sync debug mode. ``warn`` logs each stack that waits, once; ``error``
raises. Unset, nothing is installed, here or in torch.

torch's mode misses some waits. These are watched by replacing what Python calls, once and
for good: ``torch.cuda.synchronize`` and ``torch.accelerator.synchronize`` (called through
their modules), and non-blocking copies to the host by ``Tensor.copy_`` and ``Tensor.to``
that block all the same. Outside of a step a replacement only asks a thread-local flag.

What torch.compile does when a function is first used is left alone: it waits by its nature,
and once.

Still not seen:

- ``Event.synchronize``, by design: it is how we wait, and a fence has an owner;
- a non-blocking copy of more than 64 KiB from pageable memory to the device;
- a wait in a C++ extension that does not go through torch, or in ``torch.distributed``;
- in warn mode, a wait while somebody else's filter silences Python's warnings.

torch's mode is the process's, not the thread's: while a step runs, a wait in another
thread is found as well. ``warn`` says that it was outside of a step; under ``error`` that
thread gets torch's own RuntimeError. What we watch ourselves is seen in the step's thread.
"""

import inspect
import os
import threading
import traceback
import warnings
from collections.abc import Callable
from functools import wraps

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.readiness import switch

logger = init_logger(__name__)

Function = Callable[..., object]

#: What is guarded: together, a step.
FUNCTIONS = ("execute_model", "sample_tokens")

#: How torch's warning, and its error, begin.
_SYNC = "called a synchronizing CUDA operation"
#: How torch's warning of the mode itself begins.
_PROTOTYPE = "Synchronization debug mode is a prototype feature"
#: Who tries out kernels when they are first launched, which torch does not announce.
_TRIALS = tuple(
    os.path.join(*path)
    for path in (("torch", "_inductor", "runtime", ""), ("triton", "runtime", "autotuner.py"))
)


class DeviceSyncError(RuntimeError):
    """A step waited for the device, or was about to.

    Attributes:
        function: of the model runner.
        operation: what waited, as far as known.
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
    """What this thread runs under the guard.

    Attributes:
        function: of the model runner; empty outside of a step.
        word: ``warn`` or ``error``.
        compiling: whether the step is held up by torch.compile, and not watched.
    """

    function = ""
    word = ""
    compiling = False


_step = _Step()
#: The stacks that have been logged.
_reported: set[str] = set()


def install(runner: object) -> None:
    """Guard the steps of ``runner``, if :func:`switch.sync_guard` says so.

    Args:
        runner: anything that has the methods of :data:`FUNCTIONS`; they are replaced on
            this instance.

    Raises:
        SwitchError: the variable holds a word that means nothing.
    """
    word = switch.sync_guard()
    if word == "off":
        return
    if not (current_platform.is_cuda_alike() and torch.cuda.is_available()):
        logger.warning_once(
            "%s=%s: there is no CUDA device, and nothing to guard", switch.SYNC_GUARD, word
        )
        return
    _listen()
    _exempt_compilation()
    _watch(torch.cuda, "synchronize", _synchronize("torch.cuda.synchronize"))
    _watch(torch.accelerator, "synchronize", _synchronize("torch.accelerator.synchronize"))
    _watch(torch.Tensor, "copy_", _copy)
    _watch(torch.Tensor, "to", _to)
    for name in FUNCTIONS:
        setattr(runner, name, _guarded(getattr(runner, name), name, word))
    logger.info_once(
        "Sync guard on (%s=%s): it names each wait for the device in %s",
        *(switch.SYNC_GUARD, word, " and ".join(FUNCTIONS)),
    )


def _guarded(function: Function, name: str, word: str) -> Function:
    """``function`` under torch's mode and our flag; both are as before when it is left."""

    @wraps(function)
    def guarded(*args: object, **kwargs: object) -> object:
        if kwargs.get("dummy_run"):  # runner V2 profiles and warms up by steps
            return function(*args, **kwargs)
        mode = torch.cuda.get_sync_debug_mode()
        outer = _step.function, _step.word
        _exempt_compilation()  # torch._dynamo.reset() forgets what it was told
        torch.cuda.set_sync_debug_mode(word)
        _step.function, _step.word = name, word
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            if isinstance(error, DeviceSyncError) or _SYNC not in str(error):
                raise
            raise DeviceSyncError(name, f"it {_SYNC}") from error
        finally:
            _step.function, _step.word = outer
            torch.cuda.set_sync_debug_mode(mode)

    return guarded


def _exempt_compilation() -> None:
    """Have torch.compile say when it begins and ends."""
    from torch._dynamo.callback import callback_handler  # not loaded for nothing

    if _compile_starts not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_compile_starts)
        callback_handler.register_end_callback(_compile_ends)


def _compile_starts(_: object) -> None:
    if _step.function:
        _step.compiling = True
        torch.cuda.set_sync_debug_mode("default")


def _compile_ends(_: object) -> None:
    if _step.compiling:
        _step.compiling = False
        torch.cuda.set_sync_debug_mode(_step.word)


def _report(operation: str) -> None:
    """Raise, or log the stack unless it has been logged.

    Raises:
        DeviceSyncError: if this thread's step runs under ``error``.
    """
    if _step.compiling or _tries_out():
        return
    if _step.word == "error":
        raise DeviceSyncError(_step.function, operation)
    stack = _stack()
    if stack not in _reported:
        _reported.add(stack)
        who = _step.function or f"Thread {threading.current_thread().name}, outside of a step,"
        logger.warning("%s waits for the device: %s\n%s", who, operation, stack)


def _tries_out() -> bool:
    """Whether a compiled kernel is being tried out."""
    frame = inspect.currentframe()
    while frame is not None:
        if any(part in frame.f_code.co_filename for part in _TRIALS):
            return True
        frame = frame.f_back
    return False


def _stack() -> str:
    """This thread's stack from the step on, without the guard's own frames."""
    frames = traceback.extract_stack()
    ours = [index for index, frame in enumerate(frames) if frame.filename == __file__]
    # The outermost is the step's, unless there is none.
    start = ours[0] if _step.function else -1
    kept = [frame for index, frame in enumerate(frames) if index > start and index not in ours]
    return "".join(traceback.format_list(kept)).rstrip()


def _listen() -> None:
    """Have torch's warnings reported here, each time and not once a place."""
    warnings.filterwarnings("ignore", message=_PROTOTYPE)
    warnings.filterwarnings("always", message=_SYNC)
    others: Function = warnings.showwarning
    if getattr(others, "__module__", None) == __name__:
        return

    def showwarning(message: Warning | str, *args: object, **kwargs: object) -> None:
        if str(message).startswith(_SYNC):
            _report(f"it {_SYNC}")
        else:
            others(message, *args, **kwargs)

    warnings.showwarning = showwarning


def _watch(owner: object, name: str, make: Callable[[Function], Function]) -> None:
    """Replace ``owner.name`` by what ``make`` makes of it, unless that has been done."""
    original = getattr(owner, name)
    if getattr(original, "__module__", None) != __name__:
        setattr(owner, name, make(original))


def _synchronize(name: str) -> Callable[[Function], Function]:
    """A wait for a whole device."""

    def make(original: Function) -> Function:
        def synchronize(*args: object, **kwargs: object) -> object:
            if _step.function:
                _report(name)
            return original(*args, **kwargs)

        return synchronize

    return make


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
        # It makes its destination itself: only the result tells.
        if _step.function and _non_blocking(args, kwargs) and _blocks(result, self):
            _report("Tensor.to, though non_blocking")
        return result

    return to


def _non_blocking(args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Whether a copy was asked not to block; torch's mode sees the others."""
    return bool(kwargs.get("non_blocking")) or any(arg is True for arg in args)


def _blocks(destination: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a non-blocking copy to the host waits all the same.

    It does if ``destination`` is pageable, or if the bytes are not all in one piece on
    both sides: then torch goes through a temporary, which is pageable.
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
