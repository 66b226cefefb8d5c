"""Kill a run of the tool, or make it fail, at each of its calls into the file system.

A run is a forked child of a small process, because a fork of this process, which has
imported vLLM, takes longer than the run. An audit hook sees every call that opens, renames,
removes or creates a file; wrappers see the calls that are not audited (write, fsync, close).

Runs are killed only before calls that change the disk, and before all calls of
:mod:`subprocess`, whose children may change it. A kill before any other call (a read, a sync,
a close) leaves the same disk as a kill before the next change. A test checks that those
other calls change nothing.
"""

import atexit
import functools
import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from overlay import cli

#: Audited calls that change nothing; an open does so only for writing.
_LOOKING = frozenset({"fcntl.flock", "os.listdir", "os.scandir"})
_CHANGING = frozenset(
    {"subprocess.Popen"}
    | {f"os.{name}" for name in ("mkdir", "rename", "remove", "rmdir", "chmod", "chown")}
    | {f"os.{name}" for name in ("truncate", "utime", "link", "symlink", "setxattr", "removexattr")}
)
_WRAPPED = ("write", "fsync", "close")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

_CRASHED, _NOT_REACHED = 70, 71
_TOOLS = [str(Path(cli.__file__).parents[1]), str(Path(__file__).parents[1])]
# argparse imports shutil when it runs; those calls must not count.
_SERVE = "import shutil, sys; sys.path[:0] = sys.argv[1:]; "
_SERVE += "from support import faults; faults.serve()"


class Call(NamedTuple):
    """A call into the file system.

    Attributes:
        name: the audit event's, or the function's.
        changes: whether it may change the disk.
        disk: the digest of the installation before it.
    """

    name: str
    changes: bool
    disk: str


def cut(arguments: Sequence[str], root: Path, at: int, error: int = 0) -> int | None:
    """Run the tool of the checkout ``root`` with a fault; return the status that ``waitpid`` gives.

    The run is killed before its change number ``at``, counted from 1; a write is half done. With
    ``error``, its call number ``at`` fails with this error instead. Then every call counts, also
    one that changes nothing. A close that fails has closed. None is returned if the run made fewer
    changes or calls and ended with 0.
    """
    status: int | None = _answer(arguments, root, at, error)
    return status


def calls(arguments: Sequence[str], root: Path, site: Path) -> list[Call]:
    """Run the tool on the installation in ``site``; the calls that :func:`cut` counts."""
    return [Call(*call) for call in _answer(arguments, root, 0, 0, site)]


def digest(site: Path) -> str:
    """A digest of everything in ``site`` except times.

    The source's time in bytecode is left out as well. No command of the tool reads times, so
    it treats two trees of one digest alike.
    """
    state = hashlib.sha256()
    for folder, folders, files in os.walk(site):
        folders.sort()
        for name in sorted([*folders, *files]):
            path = os.path.join(folder, name)
            status = os.lstat(path)
            data = b""
            if stat.S_ISLNK(status.st_mode):
                data = os.fsencode(os.readlink(path))
            elif stat.S_ISREG(status.st_mode):
                with open(path, "rb") as file:
                    data = file.read()
            if name.endswith(".pyc"):
                data = data[:8] + data[12:]
            facts = (os.path.relpath(path, site), status.st_mode, status.st_uid, status.st_gid)
            state.update(repr((*facts, len(data))).encode() + data)
    return state.hexdigest()


def _answer(
    arguments: Sequence[str], root: Path, at: int, number: int, site: Path | None = None
) -> Any:
    server = _server()
    assert server.stdin
    assert server.stdout
    request = (list(arguments), str(root), at, number, site and str(site))
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    return json.loads(server.stdout.readline())


@functools.cache
def _server() -> "subprocess.Popen[str]":
    """The small process; it ends with this one, because its input ends."""
    server = subprocess.Popen(
        [sys.executable, "-I", "-c", _SERVE, *_TOOLS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.communicate)
    return server


def serve() -> None:
    """Serve requests, a line each, until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Drop the tool's output.
    for line in sys.stdin:
        answers.write(json.dumps(_forked(*json.loads(line))) + "\n")
        answers.flush()


def _forked(arguments: Sequence[str], root: str, at: int, number: int, site: str | None) -> object:
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        status = _CRASHED
        try:
            cli.ROOT = Path(root)
            report = os.fdopen(theirs, "w")  # before calls are counted
            listed: list[Call] | None = [] if site else None
            reached = _count(at, number, listed, Path(site or root))
            status = cli.main(arguments)
            if listed is not None:
                json.dump(listed, report)
                report.flush()
            elif not reached() and status == 0:
                status = _NOT_REACHED
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(theirs)
    with open(ours, "rb") as file:
        answer = file.read()
    _, status = os.waitpid(child, 0)
    if site:
        return json.loads(answer)
    return None if os.WIFEXITED(status) and os.WEXITSTATUS(status) == _NOT_REACHED else status


def _count(at: int, number: int, listed: list[Call] | None, site: Path) -> Callable[[], bool]:
    """Count the calls, and cause the fault at call ``at``; or only list them."""
    count = 0
    inside = False
    every = number != 0 or listed is not None

    def call(name: str, changes: bool) -> None:
        nonlocal count, inside
        if inside:
            return
        changes = changes or _in_subprocess()
        if not (changes or every):
            return
        count += 1
        inside = True
        try:
            if listed is not None:
                listed.append(Call(name, changes, digest(site)))
            elif count == at and number == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            elif count == at:
                raise OSError(number, os.strerror(number), "a file")
        finally:
            inside = False

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            call(event, bool(arguments[2] & _WRITING))
        elif event in _LOOKING or event in _CHANGING:
            call(event, event in _CHANGING)

    for name in _WRAPPED:
        original = getattr(os, name)

        def wrapper(*arguments: Any, _name: str = name, _call: Any = original) -> Any:
            if _name == "write" and count + 1 == at and not every:
                _call(arguments[0], arguments[1][: len(arguments[1]) // 2])
            if _name == "close":  # It closes even if it fails or is killed.
                _call(*arguments)
                call(_name, False)
                return None
            writes = _name == "write"
            call("pipe" if writes and _in_subprocess() else _name, writes)
            return _call(*arguments)

        setattr(os, name, wrapper)
    sys.addaudithook(hook)
    return lambda: count >= at


def _in_subprocess() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame and frame.f_code.co_filename != subprocess.__file__:
        frame = frame.f_back
    return frame is not None
