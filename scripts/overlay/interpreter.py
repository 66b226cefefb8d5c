"""Python interpreters: import paths, and the interpreter of an installation."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlay.errors import Exit, OverlayError, usage

#: Mark before the answer on stdout: sitecustomize, .pth files and wrappers may also print there.
MARK = b"\nreadiness-overlay answers: "

#: The empty entry of sys.path is the current directory, where a ``json.py`` may be.
_ASK = f"""
import sys
sys.path = [path for path in sys.path if path]
import json, os, site
users = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
derived = sys.prefix != getattr(sys, "base_prefix", "")
answer = dict(executable=sys.executable, path=sys.path,
              own=[sys.prefix] if derived else site.getsitepackages() + users)
os.write(1, {MARK!r} + json.dumps(answer).encode() + b"\\n")
"""
#: Longest wait for an answer, in seconds: the modules compile in two.
LIMIT = 120.0
#: PYTHON variables that are passed on, because they control the user site directory.
_KEPT = ("PYTHONUSERBASE", "PYTHONNOUSERSITE")

_LAYOUT = re.compile(r"^(.*)/lib(?:64)?/(python3(?:\.\d+t?)?)/(?:site|dist)-packages$")


@dataclass(frozen=True)
class Interpreter:
    """Python interpreter that has been queried.

    Attributes:
        executable: absolute path, of the real interpreter if a shim was queried.
        path: ``sys.path`` without the current directory.
        own: a virtual environment's prefix; else the directories of ``site.getsitepackages()``
            and the user site directory, if enabled.
    """

    executable: Path
    path: list[str]
    own: list[Path]


class Hung(OverlayError):
    """An interpreter did not answer within :data:`LIMIT`; its processes were ended."""

    def __init__(self, interpreter: Path) -> None:
        super().__init__(
            Exit.USAGE,
            f"gave no answer within {LIMIT:g} s",
            subject=interpreter,
            next_step="end or mend what it waits for, or name another interpreter with --python=",
        )


class NoAnswer(Exception):
    """A program ended without an answer; the message is its stderr or exit status."""


class NotStarted(NoAnswer):
    """An interpreter cannot be started; the message is the system's."""


def answer(
    interpreter: Path,
    program: str,
    *flags: str,
    request: object = None,
    inherited: Sequence[int] = (),
) -> Any:  # noqa: ANN401 (whatever JSON holds)
    """Run Python source with an interpreter, and return the decoded answer.

    Args:
        interpreter: path of the interpreter.
        program: reads JSON from stdin, and writes :data:`MARK` and a line of JSON to stdout.
        flags: options of the interpreter.
        request: a JSON-serialisable value for stdin.
        inherited: file descriptors that the program inherits.

    Raises:
        NoAnswer: the program wrote no valid answer.
        NotStarted: the interpreter does not run.
        Hung: it did not end in time.

    >>> answer(Path(sys.executable), f"print({MARK.decode()!r}, [1])")
    [1]
    """
    # Pass on this process's -B as a flag, because -I ignores PYTHONDONTWRITEBYTECODE.
    quiet = ["-B"] if sys.dont_write_bytecode else []
    command = [str(interpreter), *quiet, *flags, "-c", program]
    kept = {k: v for k, v in os.environ.items() if k in _KEPT or not k.startswith("PYTHON")}
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Before 3.11, marshal writes sets in hash order; -I would ignore the variable.
            env=kept | {"PYTHONHASHSEED": "0"},
            pass_fds=inherited,
            start_new_session=True,
        )
    except OSError as error:
        raise NotStarted(error.strerror) from None
    with child:
        try:
            out, errors = child.communicate(json.dumps(request).encode(), LIMIT)
        except subprocess.TimeoutExpired:
            raise Hung(interpreter) from None
        finally:
            # A wrapper's children may hold the lock.
            if child.returncode is None:
                os.killpg(child.pid, signal.SIGKILL)
    _, mark, end = out.rpartition(MARK)
    with contextlib.suppress(ValueError, RecursionError):  # A truncated or forged answer.
        if mark:
            return json.loads(end.partition(b"\n")[0])
    status = f"exit status {child.returncode}" if child.returncode else "it wrote no answer"
    raise NoAnswer(errors.decode(errors="replace").strip() or status)


def ask(executable: Path) -> Interpreter:
    """Query an interpreter, in the current directory; OverlayError if it is no Python.

    >>> ask(Path(sys.executable)).executable.name
    'python...'
    """
    try:
        facts = answer(executable, _ASK)
    except NoAnswer as error:
        raise usage(
            f"does not run as a Python interpreter: {error}",
            "name another with --python=, or the directory with --site=",
            executable,
        ) from None
    real = Path(facts["executable"] or "")
    return Interpreter(
        real if real.is_absolute() and os.access(real, os.X_OK) else executable,
        facts["path"],
        [Path(path) for path in facts["own"]],
    )


def of_directory(site: Path) -> Path | None:
    """Return the Python of the environment that holds ``site``; None if not found.

    >>> of_directory(site) is None
    True
    """
    match = _LAYOUT.search(str(site))
    if not match:
        return None
    prefix, name = Path(match[1]), match[2]
    candidates = [prefix / "bin" / name]
    # Unlike Path.exists, os.path treats inaccessible files as absent; few commands need the Python.
    if os.path.isfile(prefix / "pyvenv.cfg"):
        candidates.insert(0, prefix / "bin" / "python")
    if prefix == Path("/usr/local"):  # Debian's Python in /usr/bin installs there.
        candidates.append(Path("/usr/bin", name))
    return next((path for path in candidates if os.path.exists(path)), None)


def command(python: str) -> Path:
    """Return an interpreter's absolute path; OverlayError if the path or command cannot run.

    >>> command("sh").name
    'sh'
    """
    if found := shutil.which(python):
        return Path(found).absolute()
    raise usage(
        "is not an interpreter that can be run", "name one: --python=/path/to/python3", python
    )


def behind(executable: Path) -> Path:
    """Return the real interpreter behind a shim; ``executable`` itself if it does not run.

    That is no error here: most reverts compile nothing, and need no interpreter.

    Raises:
        Hung: it did not end in time.

    >>> behind(Path(sys.executable)).name
    'python...'
    """
    try:
        return ask(executable).executable
    except Hung:
        raise
    except OverlayError:
        return executable
