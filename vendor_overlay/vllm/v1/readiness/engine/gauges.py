"""What an operator of the overlay fears, counted: upstream's path, and memory that is held.

A feature that leaves something to upstream's path says so here, with the reason; what holds
memory is asked for it when somebody looks. The probe's thread shows both on /metrics.
"""

# mirrors: nothing

import threading
import weakref
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol


class Metric(NamedTuple):
    """One metric.

    Attributes:
        kind: as Prometheus names it: ``counter`` or ``gauge``.
        description: for the help line.
        labels: the names of its labels.
    """

    kind: str
    description: str
    labels: tuple[str, ...]


FALLBACKS = "fallbacks"
SLOTS = "slots"
SLOT_BYTES = "slot_bytes"
PINNED_BYTES = "pinned_bytes"

METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        FALLBACKS: Metric(
            "counter",
            "Times that vLLM's own path served what a feature that is on was to serve.",
            ("feature", "reason"),
        ),
        SLOTS: Metric("gauge", "Requests that have a slot on the device.", ("feature",)),
        SLOT_BYTES: Metric("gauge", "Device memory allocated for slots.", ("feature",)),
        PINNED_BYTES: Metric("gauge", "Pinned host memory of the overlay.", ("owner",)),
    }
)

#: Why something is left to upstream.
NO_ROOM = "no device memory"
NO_SLOT = "more requests than slots"
OTHER_BITS = "torch draws other numbers"
OTHER_CLASS = "another class"
OTHER_INPUT = "an unusual request or step"


class Value(NamedTuple):
    """The value of one metric.

    Attributes:
        metric: of :data:`METRICS`.
        labels: the values of its labels, in their order.
        value: the number.
    """

    metric: str
    labels: tuple[str, ...]
    value: int


class Holder(Protocol):
    """An object that holds memory."""

    def held(self) -> Iterable[Value]:
        """Return what it holds now; called by any thread."""


#: Re-entrant: the garbage collector may run anything while it is held.
_lock = threading.RLock()
_fallbacks: dict[tuple[str, str], int] = {}
_holders: "weakref.WeakSet[Holder]" = weakref.WeakSet()


def fall_back(feature: str, reason: str) -> None:
    """Count something that is left to upstream's path although the feature is on.

    Args:
        feature: its name.
        reason: one of those above.
    """
    with _lock:
        _fallbacks[feature, reason] = _fallbacks.get((feature, reason), 0) + 1


def watch(holder: Holder) -> None:
    """Ask an object for what it holds, for as long as it lives."""
    with _lock:
        _holders.add(holder)


def collect() -> list[Value]:
    """Return all values of this process, in order; those of several objects are added up."""
    with _lock:
        counted = [Value(FALLBACKS, key, number) for key, number in _fallbacks.items()]
        holders = list(_holders)
    sums: dict[tuple[str, tuple[str, ...]], int] = {}
    for metric, labels, value in (*counted, *(each for one in holders for each in one.held())):
        sums[metric, labels] = sums.get((metric, labels), 0) + value
    return sorted(Value(*key, value) for key, value in sums.items())
