"""Conversion of the device's clock to the host's, without waits.

Two completed CUDA events with timing give a duration on the device's clock. A reference is a moment
known on both clocks: the end of a wait during which an event completed. All other times are
durations since the reference. An event completes after its launch, and before the host has seen it
complete. A result outside of these limits shows that the reference is inaccurate. The limit then
becomes the new reference.
"""

# mirrors: nothing

from typing import Any

#: Maximum age of a reference in nanoseconds. Beyond it ``elapsed_time``, a 32-bit float of
#: milliseconds, is coarser than a microsecond.
_HORIZON = 8_000_000_000


class DeviceClock:
    """Converts completion times of events to ``time.perf_counter_ns``. Not thread-safe.

    The argument of ``elapsed_time`` must be of torch's own type, not of a subclass. So
    ``elapsed_time`` is called on ``ready`` with the earlier event, and returns a negative time.
    """

    def __init__(self) -> None:
        self._reference: Any = None
        self._reference_time = 0  # when the reference completed

    def times(
        self, started: Any, ready: Any, launched: int, seen: int, waited: bool
    ) -> tuple[int, int]:
        """Return the completion times of two events, in ns.

        ``started`` is an event of torch's own type, and ``ready`` a later one, possibly of a
        subclass. The host launched the work before ``ready`` at ``launched``, and saw ``ready``
        complete at ``seen``, after a wait if ``waited``. These limits bound the time of ``ready``.

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
    """Return the elapsed device time between two events, in nanoseconds."""
    milliseconds: float = later.elapsed_time(earlier)
    return -round(milliseconds * 1e6)
