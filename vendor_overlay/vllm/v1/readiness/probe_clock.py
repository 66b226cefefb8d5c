"""When the device did something, on the host's clock, without waiting for it.

A CUDA event that is made with timing tells, when it has completed, how long after another
one it did so. What is missing is one moment on both clocks. Whenever the host really waits
for an event, the end of the wait is one: the event completed then, but for the time that a
wait takes to return. Between two such moments the device's own clock is trusted, and held
to what is certain: nothing completes before it was launched, or after it was seen. What
contradicts that is the moment that is known, and a better one takes its place.
"""

from typing import Any

#: ``elapsed_time`` is a 32-bit float of milliseconds: beyond this many nanoseconds it no
#: longer tells microseconds apart, and a new reference is taken.
_HORIZON = 8_000_000_000


class DeviceClock:
    """Turns completed events into ``time.perf_counter_ns``. One thread at a time.

    Torch takes an event as ``elapsed_time``'s argument only if it is of torch's own type,
    and none of a subclass. So ``ready``, which may be, is always asked for the time until
    one that came before it, which is negative.
    """

    def __init__(self) -> None:
        self._reference: Any = None
        self._at = 0  # when the reference completed

    def times(
        self, started: Any, ready: Any, launched: int, seen: int, waited: bool
    ) -> tuple[int, int]:
        """When two events completed.

        Args:
            started: a completed event with timing, of torch's own type.
            ready: the same, and later than ``started``; it may be of a subclass.
            launched: when the host launched what ``ready`` is behind.
            seen: when the host saw ``ready`` complete; no earlier than it did.
            waited: whether the host waited for it until then.

        Returns:
            Both, in nanoseconds of ``time.perf_counter_ns``; ``ready`` lies between
            ``launched`` and ``seen``.

        Raises:
            RuntimeError: an event has no timing, or has not completed.
        """
        length = _between(started, ready)
        if waited or self._reference is None:
            told = seen
        else:
            told = self._at + _between(self._reference, ready)
        late = min(max(told, launched), seen)
        if waited or self._reference is None or late != told or late - self._at > _HORIZON:
            self._reference, self._at = started, late - length
        return late - length, late


def _between(one: Any, ready: Any) -> int:
    """Nanoseconds from an event until a later one."""
    milliseconds: float = ready.elapsed_time(one)
    return -round(milliseconds * 1e6)
