"""The host time at which the device reached an event, without waiting for the event.

A completed CUDA event with timing gives the time since another event, on the device's clock.
To place it on the host's clock, one moment must be known on both. Each time the host
really waits for an event, the end of the wait is such a moment: the event completed then,
except for the time that a wait takes to return. Between two such moments the device's clock is
trusted within what is certain: nothing completes before it was launched, or after it was seen
to be complete. A result outside these limits shows that the known moment was inaccurate, and
the limit becomes the new known moment.
"""

# mirrors: nothing

from typing import Any

#: ``elapsed_time`` is a 32-bit float of milliseconds: beyond this many nanoseconds it is
#: coarser than a microsecond, and a new reference is taken.
_HORIZON = 8_000_000_000


class DeviceClock:
    """Converts completed events into ``time.perf_counter_ns``. For one thread at a time.

    ``elapsed_time`` accepts as its argument only torch's own type of event, not a subclass.
    So it is called on ``ready``, which may be of a subclass, with an earlier event as
    argument, and returns a negative time.
    """

    def __init__(self) -> None:
        self._reference: Any = None
        self._reference_time = 0  # when the reference completed

    def times(
        self, started: Any, ready: Any, launched: int, seen: int, waited: bool
    ) -> tuple[int, int]:
        """Return when two events completed.

        Args:
            started: a completed event with timing, of torch's own type.
            ready: the same, and later than ``started``; it may be of a subclass.
            launched: when the host launched the work that ``ready`` follows.
            seen: when the host saw that ``ready`` is complete.
            waited: whether the host waited for it until then.

        Returns:
            Both times, in nanoseconds of ``time.perf_counter_ns``; that of ``ready`` lies
            between ``launched`` and ``seen``.

        Raises:
            RuntimeError: an event has no timing, or has not completed.
        """
        duration = _between(started, ready)
        if waited or self._reference is None:
            estimate = seen
        else:
            estimate = self._reference_time + _between(self._reference, ready)
        end = min(max(estimate, launched), seen)
        begin = end - duration
        inaccurate = end != estimate or end - self._reference_time > _HORIZON
        if waited or self._reference is None or inaccurate:
            self._reference, self._reference_time = started, begin
        return begin, end


def _between(earlier: Any, later: Any) -> int:
    """Nanoseconds of the device from one event to a later one."""
    milliseconds: float = later.elapsed_time(earlier)
    return -round(milliseconds * 1e6)
