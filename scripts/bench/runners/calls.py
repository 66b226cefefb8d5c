"""CUDA calls of the host, counted in a trace of PyTorch's profiler."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any

#: Between whose beginning and end nothing counts.
APART = "apart"
_CALLS = ("cuda_runtime", "cuda_driver")
#: A thread, a beginning and an end.
_Span = tuple[object, float, float]


def mark(owner: Any, name: str, label: str) -> None:
    """Show each call of an object's method to the profiler, under a label."""
    from torch.profiler import record_function

    function: Callable[..., Any] = getattr(owner, name)

    @wraps(function)
    def marked(*args: Any, **kwargs: Any) -> Any:
        with record_function(label):
            return function(*args, **kwargs)

    setattr(owner, name, marked)


def count(events: Iterable[Mapping[str, Any]], steps: int) -> dict[str, dict[str, float]]:
    """Return, for each label, CUDA calls and their microseconds on the host, a step.

    Calls within another call, and calls under :data:`APART`, do not count.

    Args:
        events: "traceEvents" of a trace in Chrome's format.
        steps: that were traced.
    """
    marks: dict[str, list[_Span]] = {}
    calls: list[_Span] = []
    for event in events:
        if event.get("ph") != "X":
            continue
        span = (event.get("tid"), float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        if event.get("cat") == "user_annotation":
            marks.setdefault(event["name"], []).append(span)
        elif event.get("cat") in _CALLS:
            calls.append(span)
    apart = _Spans(marks.pop(APART, []))
    counted = [call for call in _outermost(calls) if call not in apart]
    result = {}
    for label, spans in marks.items():
        within = _Spans(spans)
        times = [end - begin for begin, end in (c[1:] for c in counted if c in within)]
        result[label] = {"calls": len(times) / steps, "us": sum(times) / steps}
    return result


def _outermost(spans: Iterable[_Span]) -> list[_Span]:
    kept: list[_Span] = []
    for span in sorted(spans, key=lambda span: (str(span[0]), span[1], -span[2])):
        if not (kept and kept[-1][0] == span[0] and span[2] <= kept[-1][2]):
            kept.append(span)
    return kept


class _Spans:
    """Spans that do not overlap, other than where one lies in another."""

    def __init__(self, spans: Sequence[_Span]) -> None:
        self._of: dict[object, list[_Span]] = {}
        for span in _outermost(spans):
            self._of.setdefault(span[0], []).append(span)

    def __contains__(self, span: _Span) -> bool:
        spans = self._of.get(span[0], [])
        place = bisect_right(spans, span[1], key=lambda one: one[1])
        return place > 0 and span[2] <= spans[place - 1][2]
