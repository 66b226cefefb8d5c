"""Sync guard: report steps that wait for the device, by torch's CUDA sync debug mode.

torch's mode is per process (vLLM issue 51455), so waits outside of a step are filtered here. Waits
that occur once, as a function is compiled or a kernel is tuned, are not reported.
"""

# mirrors: nothing

import traceback
import warnings
from contextvars import ContextVar
from functools import partial

import torch
from vllm.logger import init_logger
from vllm.v1.readiness.engine import switch
from vllm.v1.readiness.watch.wrapping import Function, wrap_once

logger = init_logger(__name__)

_SYNC = "called a synchronizing CUDA operation"
_COMPILERS = ("torch/_dynamo/convert_frame.py", "torch/_inductor/runtime/", "triton/runtime/autot")
#: The runner's method that this thread is in.
_step: ContextVar[str] = ContextVar("step", default="")
_reported: set[str] = set()


def install(runner: object) -> None:
    """Guard a runner's methods as the variable says; raises SwitchError if it is no known word."""
    word = switch.sync_guard()
    if word != "off" and not torch.cuda.is_available():
        logger.warning_once("%s=%s: no CUDA device, nothing to guard", switch.SYNC_GUARD, word)
    elif word != "off":
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        warnings.filterwarnings("always", message=_SYNC)
        torch.cuda.set_sync_debug_mode("warn")
        wrap_once(warnings, "showwarning", partial(_reporting, error=word == "error"), by=__name__)
        for name in ("execute_model", "sample_tokens"):
            wrap_once(runner, name, partial(_guarded, name=name), by=__name__)


def _guarded(function: Function, name: str) -> Function:
    def guarded(*args: object, **kwargs: object) -> object:
        token = _step.set("" if kwargs.get("dummy_run") else name)  # V2 profiles by dummy runs
        try:
            return function(*args, **kwargs)
        finally:
            _step.reset(token)

    return guarded


def _reporting(original: Function, error: bool) -> Function:
    def showwarning(message: Warning | str, *args: object, **kwargs: object) -> None:
        if not str(message).startswith(_SYNC):
            original(message, *args, **kwargs)
        elif name := _step.get():
            stack = "".join(traceback.format_stack()[:-2])
            if any(part in stack for part in _COMPILERS):
                return
            text = f"{name} waits for the device. Read values back through pinned memory:\n{stack}"
            if error:
                raise RuntimeError(text)
            if text not in _reported:
                _reported.add(text)
                logger.warning(text)

    return showwarning
