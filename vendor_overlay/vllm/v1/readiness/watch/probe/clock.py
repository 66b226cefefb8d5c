"""Conversion of the device's clock to the host's, without waits.

Two completed CUDA events with timing give a duration on the device's clock. The reference is a
moment known on both clocks: an event completed at the end of a host wait. All other times are
durations since the reference. An event completes between its launch and the host's observation. If
a result is outside of these limits, the reference is inaccurate, and the limit becomes the new one.
"""

# mirrors: nothing

from typing import Any

#: Maximum age of a reference in nanoseconds. Beyond it ``elapsed_time``, a 32-bit float of
#: milliseconds, is coarser than a microsecond.
_HORIZON = 8_000_000_000


class DeviceClock:
    """Converts completion times of events to ``time.perf_counter_ns``. Not thread-safe."""

    def __init__(self) -> None:
        self._reference: Any = None
        self._reference_time = 0  # when the reference completed

    def times(
        self, started: Any, ready: Any, launched: int, seen: int, waited: bool
    ) -> tuple[int, int]:
        """Return the completion times of two events, in ns.

        ``started`` is an event of torch's own type, and ``ready`` a later event, possibly of a
        subclass. The host launched the work before ``ready`` at ``launched``, and saw ``ready``
        complete at ``seen``, after a wait if ``waited``.

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
    """Return the device time between two events, in ns."""
    # The argument of ``elapsed_time`` must not be of a subclass, which ``later`` may be.
    milliseconds: float = later.elapsed_time(earlier)
    return -round(milliseconds * 1e6)
