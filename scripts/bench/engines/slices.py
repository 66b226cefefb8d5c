"""Slices of cases: several engines that are kept take a few steps each, by turns.

The speed of a rented machine differs by 1.6 times within a minute. Sides that run one after the
other meet different speeds; slices of a tenth of a second or so, taken by turns, meet the same.
"""

from __future__ import annotations

import mmap
import os
import signal
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from bench.compare import disturbance
from bench.compare.disturbance import Snapshot

#: Seconds between two looks at the baton. Between shorter ones a core is never idle for long
#: enough for Linux to move a thread there that waits for another core.
_PERIOD = 0.005

Pause = tuple[int, int]


class Baton:
    """A file that says which of several processes may run, and which still want to.

    Only the process that holds it writes to it, and the parent while nobody runs.

    Args:
        path: of the file; see :meth:`make`.
    """

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), 0)

    @classmethod
    def make(cls, path: Path, count: int) -> Baton:
        """Make the file for so many processes, none of which wants to run."""
        path.write_bytes(bytes(1 + count))
        return cls(path)

    def offer(self, places: Sequence[int]) -> None:
        """Let these processes run by turns, the first of them first."""
        for place in places:
            self._bytes[1 + place] = 1
        self._bytes[0] = places[0]

    def wait(self, place: int) -> None:
        """Wait until it is this process's turn."""
        while self._bytes[0] != place:
            time.sleep(_PERIOD)

    def pass_on(self, place: int) -> None:
        """Let the next process run that wants to; this one again, if there is no other."""
        count = len(self._bytes) - 1
        following = [(place + step) % count for step in range(1, count + 1)]
        wanting = [other for other in following if self._bytes[1 + other]]
        if wanting:
            self._bytes[0] = wanting[0]

    def leave(self, place: int) -> None:
        """Want to run no more; also of a process that has ended."""
        self._bytes[1 + place] = 0
        if self._bytes[0] == place:
            self.pass_on(place)


class Slices:
    """The slices of one process.

    Its workers are stopped while others run: for a second after a step, a vLLM worker asks for
    its next one without a rest, which takes a core from the others.

    Args:
        baton: the file.
        place: of this process.
        steps: of a slice.
        synchronize: waits for what the engine has launched.
        workers: the ids of its workers' processes.

    Attributes:
        pauses: when others ran, since :meth:`begin` (``time.perf_counter_ns``).
        looks: the kernel's counts as each pause begins, and as it ends.
    """

    def __init__(
        self,
        baton: Baton,
        place: int,
        steps: int,
        synchronize: Callable[[], None],
        workers: Sequence[int] = (),
    ) -> None:
        self._baton, self._place, self._length = baton, place, steps
        self._synchronize = synchronize
        self._workers = workers
        self._taken = 0
        self.pauses: list[Pause] = []
        self.looks: list[Snapshot] = []

    def wait(self) -> None:
        """Wait for the process's turn."""
        self._baton.wait(self._place)
        self._signal(signal.SIGCONT)

    def leave(self) -> None:
        """Let the others run until they have ended, too."""
        self._signal(signal.SIGSTOP)
        self._baton.leave(self._place)

    def begin(self) -> None:
        """Begin a case, when all processes are about to."""
        self._pass()
        self._taken = 0
        self.pauses, self.looks = [], []

    def step(self) -> None:
        """Take note of a step; after the last one of a slice, let the others run."""
        self._taken += 1
        if self._taken % self._length == 0:
            began = time.perf_counter_ns()
            self.looks += self._pass()
            self.pauses.append((began, time.perf_counter_ns()))

    def _pass(self) -> tuple[Snapshot, Snapshot]:
        """Let the others run; return the kernel's counts before and after."""
        self._synchronize()  # what this side has launched is not to slow others down
        before = disturbance.snapshot()
        self._signal(signal.SIGSTOP)
        self._baton.pass_on(self._place)
        self.wait()
        return before, disturbance.snapshot()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._workers:
            with suppress(ProcessLookupError):
                os.kill(process, number)


class Active:
    """A clock that stands still in pauses.

    Args:
        pauses: in order.
    """

    def __init__(self, pauses: Sequence[Sequence[int]]) -> None:
        self._pauses = [(began, ended) for began, ended in pauses]

    def at(self, moment: int) -> int:
        """Return the moment on this clock, nanoseconds."""
        return moment - sum(
            min(moment, end) - begin for begin, end in self._pauses if begin < moment
        )

    def crossed(self, began: int, ended: int) -> bool:
        """Whether there is a pause between two moments."""
        return any(began <= begin and end <= ended for begin, end in self._pauses)

    def speeds(self, stamps: Sequence[int]) -> list[float]:
        """Return the steps a second of each slice, from its first output to its last."""
        ends = [bisect_left(stamps, begin) for begin, _ in self._pauses]
        found = []
        for first, last in pairwise([0, *ends, len(stamps)]):
            if last - first > 1:
                found.append((last - first - 1) / (stamps[last - 1] - stamps[first]) * 1e9)
        return found
