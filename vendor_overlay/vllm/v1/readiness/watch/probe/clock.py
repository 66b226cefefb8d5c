"""Conversion of the device's clock to the host's, without waits.

Two completed CUDA events with timing give a duration on the device's clock. A reference, a moment
known on both clocks, is the end of each actual wait of the host for an event. Between references
the device's clock is trusted within limits: nothing completes before its launch, or after it was
seen complete. A result outside these limits shows an inaccurate reference, and the limit becomes
the new one.
"""

# mirrors: nothing

from typing import Any

#: Nanoseconds from which ``elapsed_time``, a 32-bit float of milliseconds, is coarser than a
#: microsecond, and a new reference is taken.
_HORIZON = 8_000_000_000


class DeviceClock:
    """Converts completed events into ``time.perf_counter_ns``. Not thread-safe.

    The argument of ``elapsed_time`` must be of torch's own type, no subclass. So it is called on
    ``ready`` with the earlier event, and returns a negative time.
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
            ready: a later one, maybe of a subclass.
            launched: when the host launched the work before ``ready``.
            seen: when the host saw ``ready`` complete.
            waited: whether the host waited for it until then.

        Returns:
            Both times in ns; that of ``ready`` lies between ``launched`` and ``seen``.

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
    """Device time from one event to a later one, in nanoseconds."""
    milliseconds: float = later.elapsed_time(earlier)
    return -round(milliseconds * 1e6)
