"""The parent's clock, against which that of each measured process is checked.

A process whose clock runs slowly finds itself fast, and so does the probe in it. The process says
through a socket that a case begins and ends, and the parent notes when the kernel was told so. On a
busy machine the process may have to wait before and after it tells; it says how long that may be.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

#: Names the socket to a child, and what the child is called.
VARIABLE = "BENCH_CLOCK"
#: What two clocks may differ by: a share of the time, and seconds.
TOLERANCE, SLACK = 0.02, 0.05
#: Has the kernel stamp what is sent, with a "struct timespec"; Python has no name for it.
_STAMPED, _STAMP = 35, struct.Struct("@ll")
_BEGIN, _END = "begins", "ends"
#: Seconds that word of an end may take.
_PATIENCE = 2.0


class Clock:
    """Notes when children begin and end something; see :func:`listening`.

    Args:
        receiver: a bound datagram socket.
    """

    def __init__(self, receiver: socket.socket) -> None:
        self._receiver = receiver
        self._heard: dict[str, int] = {}

    def variable(self, child: str) -> dict[str, str]:
        """Return the variable that lets a child be heard under a name."""
        name = str(self._receiver.getsockname(), "utf-8")
        return {VARIABLE: f"{name[1:]} {child}"}

    def between(self, child: str, first: str, last: str | None = None) -> int | None:
        """Return the nanoseconds from one thing's beginning to another's end.

        Args:
            child: its name.
            first: what began.
            last: what ended; None: the same.

        Returns:
            None if the child has not said both.
        """
        labels = f"{child} {_BEGIN} {first}", f"{child} {_END} {last or first}"
        deadline = time.monotonic() + _PATIENCE
        while not all(label in self._heard for label in labels):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.01)
        began, ended = (self._heard[label] for label in labels)
        return ended - began

    def listen(self) -> None:
        """Note what is heard until the socket is closed."""
        while True:
            try:
                word, notes, _, _ = self._receiver.recvmsg(4096, 256)
            except OSError:
                return
            moment = time.monotonic_ns()
            if not word:
                return
            for level, kind, data in notes:
                if (level, kind, len(data)) == (socket.SOL_SOCKET, _STAMPED, _STAMP.size):
                    seconds, rest = _STAMP.unpack(data)
                    # since then this thread had to wait
                    moment -= max(0, time.time_ns() - seconds * 10**9 - rest)
            self._heard[word.decode()] = moment


@contextmanager
def listening() -> Iterator[Clock]:
    """Listen to children in a thread; the socket has no place in the file system."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        name = f"\0bench-{uuid.uuid4()}"
        with suppress(OSError):  # then the moment counts at which it is heard
            receiver.setsockopt(socket.SOL_SOCKET, _STAMPED, 1)
        receiver.bind(name)
        clock = Clock(receiver)
        thread = threading.Thread(target=clock.listen, daemon=True)
        thread.start()
        try:
            yield clock
        finally:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.sendto(b"", name)
            thread.join()


class Telling:
    """One beginning and end that the parent is told of.

    Attributes:
        longest: nanoseconds from before the parent was told of the one until after the other.
    """

    longest = 0


@contextmanager
def told(label: str) -> Iterator[Telling]:
    """Tell the parent that something begins, and that it ends; nobody if there is none."""
    address, _, child = os.environ.get(VARIABLE, "").partition(" ")
    telling = Telling()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:

        def tell(word: str) -> None:
            if address:
                with suppress(OSError):  # the parent then says that it did not hear
                    sender.sendto(f"{child} {word} {label}".encode(), f"\0{address}")

        before = time.perf_counter_ns()
        tell(_BEGIN)
        yield telling
        tell(_END)
        telling.longest = time.perf_counter_ns() - before


def problem(own: int, longest: int, parents: int | None) -> str | None:
    """Return what is wrong with a child's clock; None if nothing is.

    Args:
        own: nanoseconds that something took on the child's clock.
        longest: those that it may have taken between the two times that the parent was told.
        parents: those on the parent's clock, or None if it did not hear.
    """
    if parents is None:
        return "the parent did not hear it begin and end"
    slack = TOLERANCE * parents + SLACK * 1e9
    if own - slack <= parents <= longest + slack:
        return None
    return (
        f"its clock counted {own / 1e9:.2f} s, the parent's {parents / 1e9:.2f} s: "
        f"it runs at {own / parents:.2f} of the speed"
    )
