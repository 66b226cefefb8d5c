"""Processes that keep an engine and measure on request.

A request is a JSON file next to the process's output file; the answer is another file.
"""

from __future__ import annotations

import ctypes
import json
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.errors import Failure, Fatal
from bench.harness.files import replace

#: Seconds between two polls for a file.
_PERIOD = 0.05
_PR_SET_PDEATHSIG = 1


def end_with_parent(number: signal.Signals) -> None:
    """Have the kernel signal this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def asked(out: Path) -> Iterator[tuple[Path, Any]]:
    """Yield the file for the answer to each request, and the request, until one is None."""
    turn = 1
    while True:
        while not _question(out, turn).exists():
            time.sleep(_PERIOD)
        if (request := json.loads(_question(out, turn).read_text())) is None:
            return
        yield _answer(out, turn), request
        turn += 1


def ready(out: Path) -> None:
    """Report that the engine has started."""
    _ready(out).touch()


def answer(path: Path, result: Mapping[str, Any]) -> None:
    """Write an answer; one with the key "error", a sentence, ends the run."""
    replace(path, json.dumps(result).encode())


class Kept:
    """A process that keeps an engine.

    Args:
        process: the process; the caller ends it.
        out: its output file.
    """

    def __init__(self, process: subprocess.Popen[bytes], out: Path) -> None:
        self.process = process
        self._out = out
        self._turn = 0

    def started(self, timeout: float) -> None:
        """Wait until the engine has started.

        Raises:
            Failure: the process has ended, or takes longer than ``timeout`` seconds.
        """
        self._wait(_ready(self._out), timeout)

    def ask(self, request: Any) -> None:
        """Send the next request; None ends the process."""
        self._turn += 1
        replace(_question(self._out, self._turn), json.dumps(request).encode())

    def result(self, timeout: float) -> dict[str, Any]:
        """Return the answer to the last request; raises as :meth:`started`.

        Raises:
            Fatal: the answer is an error.
        """
        path = _answer(self._out, self._turn)
        self._wait(path, timeout)
        result: dict[str, Any] = json.loads(path.read_text())
        path.unlink()
        if "error" in result:
            raise Fatal(result["error"])
        return result

    def _wait(self, path: Path, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not path.exists():
            if (code := self.process.poll()) is not None and not path.exists():
                raise Failure(f"the process ended ({code})")
            if time.monotonic() > deadline:
                raise Failure(f"no end after {timeout:g} s")
            time.sleep(_PERIOD)


def _ready(out: Path) -> Path:
    return out.with_suffix(".ready")


def _question(out: Path, turn: int) -> Path:
    return out.with_suffix(f".{turn}.asked")


def _answer(out: Path, turn: int) -> Path:
    return out.with_suffix(f".{turn}.json")
