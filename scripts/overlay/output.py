"""Standard streams that never fail a run: lost output is reported at the end of the run."""

from __future__ import annotations

import errno
import io
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def escaped(text: str) -> str:
    r"""Return ``text`` on one line, with non-printable characters escaped.

    Names with line ends, terminal escapes or bidirectional marks could forge lines of a report.

    >>> print(escaped("one\ntwo"))
    one\ntwo
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


class Guarded(io.FileIO):
    """Raw stream that accepts every write, and drops data that cannot be written.

    ``error`` is the reason why data is dropped, or None.
    """

    def __init__(self, descriptor: int, error: OSError | None = None) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.error = error

    def write(self, data: ReadableBuffer, /) -> int:
        """Write or drop ``data``; return the number of bytes written or dropped."""
        while self.error is None:
            try:
                written: int | None = super().write(data)
            except OSError as error:
                self.error = error
            else:
                if written is not None:
                    return written
                select.select([], [self], [])  # A non-blocking pipe with a slow reader.
        return memoryview(data).nbytes


def run(name: str, main: Callable[[Sequence[str]], int]) -> int:
    """Run a program, and return its exit code even if its output is lost.

    SIGINT raises KeyboardInterrupt in the program, unless the process ignores SIGINT.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # Closed: open it, so that no later file gets its number.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout = _guarded(sys.stdout, 1)
    sys.stderr = _guarded(sys.stderr, 2)
    try:
        return main(sys.argv[1:])
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    finally:
        if error := lost():
            text = f"the output could not be written: {error.strerror}"
            print(f"{name}: {text}; the exit code is valid", file=sys.stderr)
        sys.stderr.flush()


def lost() -> OSError | None:
    """Return the error that lost output on stdout, or None. A closed pipe is no error.

    >>> lost() is None
    True
    """
    sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    error = raw.error if isinstance(raw, Guarded) else None
    return None if error is None or error.errno == errno.EPIPE else error


def _guarded(stream: object, descriptor: int) -> io.TextIOWrapper:
    if not isinstance(stream, io.TextIOWrapper):
        raw = Guarded(descriptor, OSError(errno.EBADF, "it is closed"))
        return io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace")
    return io.TextIOWrapper(
        io.BufferedWriter(Guarded(descriptor)),
        stream.encoding,
        "backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
