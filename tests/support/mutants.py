"""Mutants of the readbacks: faults that a test of them must find."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from vllm.v1.readiness.engine import fences
from vllm.v1.readiness.outputs import readback
from vllm.v1.readiness.outputs.readback import Readback, Readbacks

_arrived = readback.Buffer.arrived
_copy = Readbacks._copy
_fill = Readbacks.fill
_start = Readbacks.start
_take = Readbacks._take


def _no_wait(_: torch.Event, __: str) -> None:
    """Take the place of ``fences.wait``."""


def _take_and_leave(self: Readbacks, size: int) -> Any:
    buffer, free = _take(self, size)
    free.append(buffer)
    return buffer, free


def _record_first(self: Readbacks, *copies: Any) -> None:
    event = torch.Event()
    event.record()
    _copy(self, *copies)
    copies[-1].event = event


def _record_last_time(self: Readbacks, *copies: Any) -> None:
    buffer = copies[-1]
    _copy(self, *copies)
    newest = buffer.event
    buffer.event = self.__dict__.get("planted", newest)
    self.__dict__["planted"] = newest


def _record_elsewhere(self: Readbacks, *copies: Any) -> None:
    _copy(self, *copies)
    copies[-1].event = torch.Event()
    copies[-1].event.record(torch.cuda.Stream())


def _forget_sources(self: Readbacks, sources: Any, stream: Any = None) -> Readback:
    with patch.object(torch.Tensor, "record_stream", lambda *_: None):
        return _start(self, sources, stream)


def _copy_unordered(self: Readbacks, sources: Any, stream: Any = None) -> Readback:
    with patch.object(torch.cuda.Stream, "wait_stream", lambda *_: None):
        return _start(self, sources, stream)


def _fill_elsewhere(self: Readbacks, tensors: Any, rows: slice, sources: Any) -> bool:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        return _fill(self, tensors, rows, sources)


#: Fault to the owner and attribute that are replaced, and the replacement.
MUTANTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "read early": (fences, "wait", _no_wait),
    "reused while referred to": (Readbacks, "_take", _take_and_leave),
    "reused in flight": (readback.Buffer, "arrived", lambda _: True),
    "event before the copies": (Readbacks, "_copy", _record_first),
    "event of the copies before": (Readbacks, "_copy", _record_last_time),
    "event of another stream": (Readbacks, "_copy", _record_elsewhere),
    "sources let go of": (Readbacks, "start", _forget_sources),
    "filled on another stream": (Readbacks, "fill", _fill_elsewhere),
    "side stream that does not wait": (Readbacks, "start", _copy_unordered),
}
_STOCK = {name: getattr(owner, attribute) for name, (owner, attribute, _) in MUTANTS.items()}


def mutate(name: str | None) -> None:
    """Install one mutant in place of the one before; None restores the readbacks."""
    for other, (owner, attribute, _) in MUTANTS.items():
        setattr(owner, attribute, _STOCK[other])
    if name is not None:
        owner, attribute, mutant = MUTANTS[name]
        setattr(owner, attribute, mutant)


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """Install one mutant for the time of the context."""
    mutate(name)
    try:
        yield
    finally:
        mutate(None)
