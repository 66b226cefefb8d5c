"""The device's clock, read through events: order always holds, and errors stay small.

The simulated device has a clock of its own, which began elsewhere and runs a little faster or
slower; ``elapsed_time`` rounds to a 32-bit float, as CUDA's does.
"""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.readiness.watch.probe.clock import DeviceClock

SECOND = 10**9
#: How much faster or slower than the host's clock the device's runs; crystals are within it.
DRIFT = 50e-6


class Event:
    """An event, completed at a time of the device's clock; None: it has no timing."""

    def __init__(self, device_ns: float | None) -> None:
        self.at = device_ns

    def elapsed_time(self, other: "Event") -> float:
        """Milliseconds until ``other``, in 32 bits."""
        if self.at is None or other.at is None:
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        return float(np.float32((other.at - self.at) / 1e6))


class Copy(NamedTuple):
    """A readback as it happens, in nanoseconds.

    Attributes:
        pause: since the one before was seen.
        queue: from its launch until the device could start.
        length: of the copy.
        unseen: from when it was ready until the host looked; 0: the host was waiting.
        latency: from when it was ready until the wait for it had returned.
    """

    pause: int
    queue: int
    length: int
    unseen: int
    latency: int


_COPIES = st.lists(
    st.builds(
        Copy,
        st.integers(0, 3_000_000) | st.integers(0, 60 * SECOND),
        st.integers(0, 5_000_000),
        st.integers(0, 500_000) | st.integers(0, SECOND),
        st.just(0) | st.integers(1, 10_000_000) | st.integers(1, SECOND),
        st.integers(0, 20_000),
    ),
    min_size=1,
    max_size=40,
)


@given(
    _COPIES,
    st.floats(-DRIFT, DRIFT),
    st.floats(-1e15, 1e15),
    st.integers(0, 10**15),
)
def test_times_keep_the_hosts_order_and_errors_stay_those_of_the_last_wait(
    copies: list[Copy], drift: float, offset: float, now: int
) -> None:
    """Drift and rounding since that wait add to them."""
    clock = DeviceClock()
    first = now

    def event(at: int) -> Event:
        return Event((at - first) * (1 + drift) + offset % SECOND)

    allowed = 0.0  # the error of the reference
    since = 0  # when it was taken
    for number, copy in enumerate(copies):
        launched = now + copy.pause
        began = launched + copy.queue
        ready = began + copy.length
        waited = not copy.unseen
        seen = ready + (copy.unseen or copy.latency)
        started, ended = clock.times(event(began), event(ready), launched, seen, waited)
        assert launched <= ended <= seen
        assert started <= ended
        if waited or not number:
            allowed, since = float(seen - ready), began
        # A float of 24 bits rounds spans since the reference, or the length.
        span = max(seen - since, copy.length)
        error = allowed + (DRIFT + 2**-22) * span + 4 * (number + 1)
        assert abs(ended - ready) <= min(error, seen - launched)
        assert abs((ended - started) - copy.length) <= (DRIFT + 2**-23) * copy.length + 2
        now = seen


def test_a_reference_proved_wrong_is_replaced() -> None:
    """Nobody ever waits; now and then an output is taken soon after it was ready."""
    clock = DeviceClock()
    late, soon = 3_000_000, 10_000
    for number in range(50):
        ready = number * 8_000_000 + 5_000_000
        seen = ready + (late if number % 10 != 5 else soon)
        event = Event(ready)
        _, ended = clock.times(event, event, number * 8_000_000, seen, False)
        assert abs(ended - ready) <= (late if number < 5 else soon + 100)


def test_hours_without_a_wait_lose_no_microseconds() -> None:
    """New references are taken before ``elapsed_time`` is too coarse to tell them apart."""
    clock = DeviceClock()
    clock.times(Event(0), Event(1_000), 0, 1_000, True)
    worst = 0
    for second in range(1, 3 * 3600):
        ready = second * 1_000_437_123
        _, ended = clock.times(Event(ready - 1_000), Event(ready), 0, ready + 10**8, False)
        worst = max(worst, abs(ended - ready))
    # Of a clock that never took another: half a millisecond. Of this one, each of 1,350
    # references is off by no more than half of 2**-10 ms, and not all to one side.
    assert worst < 200_000


@pytest.mark.parametrize("waited", [True, False])
@pytest.mark.parametrize("events", [(None, 5), (5, None), (None, None)])
def test_an_event_without_timing_is_an_error(
    waited: bool, events: tuple[float | None, float | None]
) -> None:
    clock = DeviceClock()
    clock.times(Event(0), Event(10), 0, 10, True)
    one, other = map(Event, events)
    with pytest.raises(RuntimeError):
        clock.times(one, other, 20, 30, waited)
    # The next readback has its times.
    assert clock.times(Event(20), Event(30), 20, 40, False) == (20, 30)
