"""Instrumented torch events, which report waits to the probe and time readbacks."""

# mirrors: nothing

import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from vllm.v1.readiness.engine import fences
from vllm.v1.readiness.watch.probe.recorder import now, record_fence, this_thread
from vllm.v1.readiness.watch.wrapping import wrap_once

#: Flag of a class with settable attributes (Py_TPFLAGS_HEAPTYPE).
_HEAP_TYPE = 1 << 9
#: The original ``torch.Event``; set by :func:`watch`.
_torch_event: Callable[..., Any]


def watch() -> None:
    """Replace ``torch.Event``, and wrap the methods of ``torch.cuda.Event``."""
    global _torch_event  # noqa: PLW0603
    import torch

    _torch_event = torch.Event
    if not isinstance(_torch_event, type) or not hasattr(_torch_event, "synchronize"):
        return  # vLLM's CPU runner replaces torch.Event in its constructor
    original: Any = _torch_event
    create = original.__new__

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs.get("enable_timing"):
            # ``elapsed_time`` accepts only torch's own type.
            return original(*args, **kwargs)
        return create(cls, **_with_timing(kwargs))

    # torch.Event is a C type without settable attributes: replace it by a subclass.
    methods = {
        "__new__": new,
        "query": _query(original.query),
        "synchronize": _synchronize(original.synchronize),
    }
    torch.Event = _Replacement("Event", (original,), methods)
    event: Any = torch.cuda.Event
    if not event.__flags__ & _HEAP_TYPE:
        return  # on XPU, torch.cuda.Event is the C type
    create_on_cuda = event.__new__

    def new_on_cuda(cls: type, *args: Any, **kwargs: Any) -> Any:
        return create_on_cuda(cls, *args, **(kwargs if args else _with_timing(kwargs)))

    event.__new__ = new_on_cuda
    wrap_once(event, "query", _query, by=__name__)
    wrap_once(event, "synchronize", _synchronize, by=__name__)


def recorded_now(event_type: Callable[..., Any] | None = None) -> Any:
    """Return an event with timing, recorded in the current stream; None without a CUDA device."""
    if not _has_device():
        return None
    event = (event_type or _torch_event)(enable_timing=True)
    event.record()
    return event


class _Replacement(type):
    """Metaclass of a class whose base's instances and subclasses count as its own."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.__base__ or object)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.__base__ or object)


def _with_timing(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "enable_timing": True} if this_thread.timing else kwargs


def _query(original: Callable[..., Any]) -> Callable[..., Any]:
    def query(event: Any) -> Any:
        completed = original(event)
        if completed:
            this_thread.event, this_thread.seen, this_thread.waited = event, now(), False
        return completed

    return query


def _synchronize(original: Callable[..., Any]) -> Callable[..., Any]:
    def synchronize(event: Any) -> None:
        if event.query():
            original(event)
            return
        began = now()
        original(event)
        ended = now()
        this_thread.event, this_thread.seen, this_thread.waited = event, ended, True
        caller = sys._getframe(1)
        if caller.f_globals.get("__name__") != fences.__name__:  # fences reports its own waits
            record_fence(caller.f_code.co_name, began, ended)

    return synchronize


@lru_cache
def _has_device() -> bool:
    import torch

    return bool(torch.cuda.is_available())
