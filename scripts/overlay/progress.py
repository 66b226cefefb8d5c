"""Status line on the terminal for slow runs, erased before other output.

Nothing is drawn in the first second, on a dumb terminal, or if stderr is not a terminal.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from overlay.output import Guarded, escaped

#: Seconds before the line is first drawn, and between updates.
AFTER, EVERY = 1.0, 0.25
_STDERR = 2
_CLEAR = "\r\x1b[K"


class Line:
    """Status line, drawn by a thread because a step may block; ``text`` is the present step."""

    def __init__(self, name: str) -> None:
        self.text = "starting"
        self._name = name
        self._start = time.monotonic()
        self._drawn = False
        self._ended = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._draw, daemon=True).start()

    def end(self) -> None:
        """Erase the line and stop drawing."""
        with self._lock:
            if self._drawn and not self._ended.is_set():
                _write(_CLEAR)
            self._ended.set()

    def _draw(self) -> None:
        pause = AFTER
        while not self._ended.wait(pause):
            pause = EVERY
            with self._lock:
                if not self._ended.is_set():
                    self._drawn = True
                    _write(_CLEAR + self._fitting(_columns()))

    def _fitting(self, columns: int) -> str:
        """Return the line, truncated to the terminal's width."""
        seconds = f" ({time.monotonic() - self._start:.0f} s)"
        room = max(columns - 1 - len(seconds), 0)
        text = escaped(f"{self._name}: {self.text}")
        return (text if len(text) <= room else f"{text[: max(room - 3, 0)]}...") + seconds


_line: Line | None = None


@contextmanager
def shown(name: str, quiet: bool = False) -> Iterator[None]:
    """Show a status line during the context; no-op if ``quiet``, or without a terminal."""
    global _line  # noqa: PLW0603 - a process has one terminal
    dumb = os.environ.get("TERM", "dumb") == "dumb"
    if quiet or dumb or _line or not os.isatty(_STDERR):
        yield
        return
    _line = Line(name)
    for stream in (sys.stdout, sys.stderr):
        raw = getattr(getattr(stream, "buffer", None), "raw", None)
        if isinstance(raw, Guarded):
            raw.before = end
    try:
        yield
    finally:
        end()
        _line = None


def step(text: str) -> None:
    """Set the text of the status line, if any."""
    if _line:
        _line.text = text


def end() -> None:
    """Erase the status line, if any."""
    if _line:
        _line.end()


def _write(text: str) -> None:
    with suppress(OSError):  # The terminal is gone.
        os.write(_STDERR, text.encode(errors="replace"))


def _columns() -> int:
    with suppress(OSError):
        return os.get_terminal_size(_STDERR).columns or 80
    return 80
