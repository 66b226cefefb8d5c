"""The time that a run may take: rounds that would end later are not begun.

A machine that is rented by the minute ends a run wherever it is, and a run that was cut off is not
published. How many rounds there are then depends on the time alone, which is decided before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise


class Limit:
    """Decides which rounds begin.

    Args:
        seconds: that the run may take; None for as long as it takes.
        clock: returns seconds.
    """

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._began = clock()
        self._starts: dict[str, dict[int, float]] = {}
        self._once: dict[str, float] = {}

    def allows(self, group: str, number: int) -> bool:
        """Whether a round begins, or has begun.

        It begins if it ends in time by the longest round of its group. The first round is not
        typical: it counts only until there is another, without what was done :meth:`once`, and
        for the first round of the next group.

        Args:
            group: of engines that are measured together.
            number: of the round, beginning with 1.
        """
        starts, now = self._starts.setdefault(group, {}), self._clock()
        if self._seconds is None or number in starts:
            return True
        lengths = self._lengths(group, now)
        if not lengths:
            lengths = [0.0, *(of[0] for other in self._starts if (of := self._lengths(other, now)))]
        else:
            lengths[0] -= self._once.get(group, 0.0)
        if now + max(lengths[1:] or lengths) > self._began + self._seconds:
            return False
        starts[number] = now
        return True

    @contextmanager
    def once(self, group: str) -> Iterator[None]:
        """Do in a group's first round what later ones do without: start engines that are kept."""
        began = self._clock()
        try:
            yield
        finally:
            self._once[group] = self._once.get(group, 0.0) + self._clock() - began

    def _lengths(self, group: str, now: float) -> list[float]:
        """How long each round of a group took, or has taken by now, in seconds."""
        return [end - begin for begin, end in pairwise([*self._starts[group].values(), now])]
