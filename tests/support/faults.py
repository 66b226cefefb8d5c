"""Cut a run off, or fail it, at each of its calls into the file system.

A run happens in a forked child. Its calls are counted twice over: by an audit hook,
which no call that opens, renames, removes or makes a file can get round, and by
wrappers of the calls that are not audited (write, fsync, close).
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

_AUDITED = frozenset(
    {"open", "fcntl.flock", "subprocess.Popen"}
    | {f"os.{name}" for name in ("listdir", "scandir", "mkdir", "rename", "remove", "rmdir")}
    | {f"os.{name}" for name in ("chmod", "chown", "truncate", "utime", "link", "symlink")}
)
_WRAPPED = ("write", "fsync", "close")

_CRASHED, _NOT_REACHED = 70, 71

Fault = Callable[[str], None]


def kill(call: str) -> None:
    """The process ends here, as from ``kill -9`` or a power cut."""
    os.kill(os.getpid(), signal.SIGKILL)


def fail(number: int) -> Fault:
    """The call fails with this error, if it is one that changes something."""

    def raise_error(call: str) -> None:
        raise OSError(number, os.strerror(number), "a file")

    return raise_error


def forked(function: Callable[[], int], at: int, fault: Fault) -> int | None:
    """Run ``function``, which gives an exit code, in a child with ``fault`` at call ``at``.

    Returns:
        None if it made fewer calls than ``at`` and ended with 0; otherwise the status
        that ``waitpid`` gives.
    """
    child = os.fork()
    if child == 0:
        status = _CRASHED
        try:
            sys.stderr.flush()
            reached = _count(at, fault)
            status = function()
            if not reached() and status == 0:
                status = _NOT_REACHED
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return None if os.WIFEXITED(status) and os.WEXITSTATUS(status) == _NOT_REACHED else status


def _count(at: int, fault: Fault) -> Callable[[], bool]:
    calls = 0
    inside = False

    def count(name: str) -> None:
        nonlocal calls, inside
        if inside:
            return
        calls += 1
        if calls == at:
            inside = True
            try:
                fault(name)
            finally:
                inside = False

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _AUDITED:
            count(event)

    for name in _WRAPPED:
        original = getattr(os, name)

        def wrapper(*arguments: Any, _name: str = name, _call: Any = original) -> Any:
            if _name == "write" and calls + 1 == at and fault is kill:
                _call(arguments[0], arguments[1][: len(arguments[1]) // 2])
            if _name == "close":  # A close that fails or is cut off has closed all the same.
                _call(*arguments)
                count(_name)
                return None
            count(_name)
            return _call(*arguments)

        setattr(os, name, wrapper)
    sys.addaudithook(hook)
    return lambda: calls >= at
