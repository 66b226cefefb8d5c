"""Waits for torch events by the function that waits, and device times by CUDA events."""

# mirrors: nothing

import sys
import time
from collections import deque
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from vllm.v1.readiness.engine import fences
from vllm.v1.readiness.watch.probe import histograms
from vllm.v1.readiness.watch.wrapping import wrap_once

#: Flag of a class with settable attributes (Py_TPFLAGS_HEAPTYPE).
_HEAP_TYPE = 1 << 9

Report = Callable[[str, int, int], None]


def watch(report: Report) -> None:
    """Report waits for ``torch.Event`` and ``torch.cuda.Event``: function, begin and end."""
    import torch

    original: Any = torch.Event
    if not isinstance(original, type) or not hasattr(original, "synchronize"):
        return  # vLLM's CPU runner replaces torch.Event in its constructor

    create: Any = original.__new__

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        # ``elapsed_time`` accepts only torch's own type.
        timed = args or kwargs.get("enable_timing")
        return original(*args, **kwargs) if timed else create(cls, **kwargs)

    # torch.Event is a C type without settable attributes: replace it by a subclass.
    methods = {"__new__": new, "synchronize": _synchronize(original.synchronize, report)}
    torch.Event = _Replacement("Event", (original,), methods)
    if torch.cuda.Event.__flags__ & _HEAP_TYPE:  # on XPU, it is the C type
        wrap_once(
            torch.cuda.Event, "synchronize", partial(_synchronize, report=report), by=__name__
        )


class _Replacement(type):
    """Metaclass of a class whose base's instances and subclasses count as its own."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.__base__ or object)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.__base__ or object)


def _synchronize(original: Callable[..., Any], report: Report) -> Callable[..., Any]:
    def synchronize(event: Any) -> None:
        if event.query():
            original(event)
            return
        began = time.perf_counter_ns()
        original(event)
        ended = time.perf_counter_ns()
        caller = sys._getframe(1)
        if caller.f_globals.get("__name__") != fences.__name__:  # fences reports its own waits
            report(caller.f_code.co_name, began, ended)

    return synchronize


class DeviceTimes:
    """Durations of parts of steps on the current CUDA stream; no-op without a CUDA device.

    The host never waits: an event is read in a later step, once it has completed.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[str, str, Any, Any]] = deque(maxlen=64)

    def begin(self) -> Any:
        """Return an event at the begin of a part; None without a device."""
        if not _has_device():
            return None
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def end(self, process: str, part: str, began: Any) -> None:
        """End the part that ``began``, and count earlier parts that the device has completed."""
        if began is None:
            return
        self._pending.append((process, part, began, self.begin()))
        while self._pending and self._pending[0][3].query():
            label, name, first, last = self._pending.popleft()
            duration = round(first.elapsed_time(last) * 1e6)
            histograms.observe("device", duration, label, name)


@lru_cache
def _has_device() -> bool:
    import torch

    return bool(torch.cuda.is_available())
