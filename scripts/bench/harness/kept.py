"""Processes that keep an engine and measure on request, through a pipe."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any

from bench.errors import Failure

#: Seconds between two looks at the process, which may leave the pipe open to its own children.
_PERIOD = 0.5


class Kept:
    """A process that keeps an engine, see :mod:`bench.child`.

    Args:
        start: starts the process, which inherits the descriptor that it is given.
        spec: for the child; builtin types, which any Python can read.
    """

    def __init__(self, start: Callable[[int], subprocess.Popen[bytes]], spec: Any) -> None:
        self._pipe, other = Pipe()
        with other:
            self.process = start(other.fileno())
        self.ask(spec)

    def ask(self, request: Any) -> None:
        """Send a request; None ends the process. A dead process shows in :meth:`answer`."""
        with contextlib.suppress(OSError):
            self._pipe.send(request)

    def answer(self, timeout: float) -> Any:
        """Return the answer to the last request.

        Raises:
            Failure: the process has ended, or takes longer than ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while not self._pipe.poll(_PERIOD):
            if self.process.poll() is not None:
                break
            if time.monotonic() > deadline:
                raise Failure(f"no end after {timeout:g} s")
        try:
            answer = self._pipe.recv() if self._pipe.poll() else None
        except (EOFError, OSError):
            answer = None
        if answer is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_PERIOD)
            raise Failure(f"the process ended ({self.process.poll()})")
        return answer
