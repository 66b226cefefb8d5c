"""Counters of fallbacks to upstream, and gauges of memory.

``watch.exports`` exports the counters, and the probe the gauges.
"""

# mirrors: nothing

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple, Protocol


class Metric(NamedTuple):
    """A gauge's help text and label names."""

    description: str
    labels: tuple[str, ...]


#: Name of the counter of fallbacks.
FALLBACKS = "fallbacks"
SLOTS = "slots"
SLOT_BYTES = "slot_bytes"
PINNED_BYTES = "pinned_bytes"

METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        SLOTS: Metric("Requests that have a slot on the device.", ("feature",)),
        SLOT_BYTES: Metric("Device memory allocated for slots.", ("feature",)),
        PINNED_BYTES: Metric("Pinned host memory of the overlay.", ("owner",)),
    }
)

#: Reasons for a fallback.
NO_ROOM = "no device memory"
NO_SLOT = "more requests than slots"
OTHER_BITS = "torch draws other numbers"
OTHER_CLASS = "another class"
OTHER_INPUT = "an unusual request or step"
REPLACED = "a replaced function"


class Value(NamedTuple):
    """The value of a metric in :data:`METRICS` for one set of label values."""

    metric: str
    labels: tuple[str, ...]
    value: int


class Holder(Protocol):
    """Object whose memory is counted."""

    def held(self) -> Iterable[Value]:
        """Return the current values. May be called from any thread."""


#: Re-entrant: the garbage collector may run any code while the lock is held.
lock = threading.RLock()
#: Called after each fallback with feature, reason and their new count, and with the lock held.
listeners: list[Callable[[str, str, int], None]] = []
_fallbacks: dict[tuple[str, str], int] = {}
_holders: "weakref.WeakSet[Holder]" = weakref.WeakSet()


def fall_back(feature: str, reason: str) -> None:
    """Count a fallback of an enabled feature; ``reason`` is a constant of this module."""
    with lock:
        _fallbacks[feature, reason] = number = _fallbacks.get((feature, reason), 0) + 1
        for listener in listeners:
            listener(feature, reason, number)


def watch(holder: Holder) -> None:
    """Include an object's memory in the result of :func:`collect` until the object is deleted."""
    with lock:
        _holders.add(holder)


def collect() -> list[Value]:
    """Return this process's gauges, sorted and summed over all holders."""
    with lock:
        holders = list(_holders)
    sums: dict[tuple[str, tuple[str, ...]], int] = {}
    for metric, labels, value in chain.from_iterable(holder.held() for holder in holders):
        sums[metric, labels] = sums.get((metric, labels), 0) + value
    return sorted(Value(*key, value) for key, value in sums.items())
