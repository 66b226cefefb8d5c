"""Drivers that keep their engine from round to round, and the files by which they take turns.

A driver waits until its turn is asked for by a file beside the one that it writes, measures, and
answers by another file.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.errors import Failure

#: Seconds between two looks for a file.
_PERIOD = 0.05


def asked(out: Path) -> Iterator[Path]:
    """Yield the file that is to be written, each time that a turn has been asked for."""
    turn = 1
    while True:
        while not _question(out, turn).exists():
            time.sleep(_PERIOD)
        yield _answer(out, turn)
        turn += 1


def ready(out: Path) -> None:
    """Say that the engine has been started."""
    _ready(out).touch()


def answer(path: Path, result: Mapping[str, Any]) -> None:
    """Write the result of a turn; the file appears as a whole."""
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(result))
    os.replace(unfinished, path)


class Kept:
    """A driver that keeps its engine.

    Args:
        process: of the driver; whoever started it ends it.
        out: the driver's argument.
    """

    def __init__(self, process: subprocess.Popen[bytes], out: Path) -> None:
        self.process = process
        self._out = out
        self._turn = 0

    def started(self, timeout: float) -> None:
        """Wait until the engine has been started.

        Raises:
            Failure: the driver has ended, or takes longer than ``timeout`` seconds.
        """
        self._wait(_ready(self._out), timeout)

    def ask(self) -> None:
        """Ask for the next turn."""
        self._turn += 1
        _question(self._out, self._turn).touch()

    def result(self, timeout: float) -> dict[str, Any]:
        """Return the result of the turn that was asked for; errors as for :meth:`started`."""
        path = _answer(self._out, self._turn)
        self._wait(path, timeout)
        result: dict[str, Any] = json.loads(path.read_text())
        path.unlink()
        return result

    def _wait(self, path: Path, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not path.exists():
            if (code := self.process.poll()) is not None:
                raise Failure(f"the driver ended ({code})")
            if time.monotonic() > deadline:
                raise Failure(f"no end after {timeout:g} s")
            time.sleep(_PERIOD)


def _ready(out: Path) -> Path:
    return out.with_suffix(".ready")


def _question(out: Path, turn: int) -> Path:
    return out.with_suffix(f".{turn}.asked")


def _answer(out: Path, turn: int) -> Path:
    return out.with_suffix(f".{turn}.json")
