"""What a program prints: it reaches the reader, or the run goes on without it."""

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
    """``text`` on one line, with an escape for each character that is not shown as itself.

    A name may hold line ends, escape sequences, or marks that reverse the text; as they
    are, they could pass for other lines of a report.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


class Guarded(io.RawIOBase):
    """A descriptor that takes everything that is written to it, and drops what fails.

    Attributes:
        error: why something was dropped, or None.
    """

    def __init__(self, descriptor: int, error: OSError | None = None) -> None:
        self._descriptor = descriptor
        self.error = error

    def writable(self) -> bool:
        """Always, as far as the writer can tell."""
        return True

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return os.isatty(self._descriptor)

    def write(self, data: ReadableBuffer, /) -> int:
        """Write ``data``, or drop it; the number of bytes that are done with."""
        while self.error is None:
            try:
                return os.write(self._descriptor, data)
            except BlockingIOError:  # Somebody set the pipe so, and reads slowly.
                select.select([], [self._descriptor], [])
            except OSError as error:
                self.error = error
        return memoryview(data).nbytes


def run(name: str, main: Callable[[Sequence[str]], int]) -> int:
    """Run a program whose exit code is its work's, whether or not its output gets through.

    From here on Ctrl-C is a KeyboardInterrupt, if it was to end the process at once before.

    Args:
        name: the program's, for the line on stderr that says what was lost.
        main: takes the process's arguments; its exit code. It may leave Ctrl-C to this.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # It is closed: no file that is opened later may take its place.
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
            print(f"{name}: {text}; the exit code says what was done", file=sys.stderr)
        sys.stderr.flush()


def lost() -> OSError | None:
    """Why some of the output did not get through, if so.

    A reader that goes away has seen enough; nothing is lost.
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
