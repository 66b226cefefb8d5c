"""Python interpreters: what they import, and which one runs an installation."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from overlay.errors import Exit, OverlayError

#: Our programs write this before their answer, because sitecustomize, a ``.pth`` file or a
#: wrapper may print as well.
MARK = b"\nreadiness-overlay answers: "

#: The empty entry is the current directory, which must not shadow ``json``.
_ASK = f"""
import sys
sys.path = [path for path in sys.path if path]
import json, os, site
users = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
answer = dict(version=sys.version_info[:2], free="t" in getattr(sys, "abiflags", ""),
              executable=sys.executable, path=sys.path, prefix=sys.prefix, users=users,
              derived=sys.prefix != getattr(sys, "base_prefix", ""),
              shared=site.getsitepackages())
os.write(1, {MARK!r} + json.dumps(answer).encode() + b"\\n")
"""
#: The installation is served without this shell's settings; these two tell where the user's own
#: packages are.
_KEPT = ("PYTHONUSERBASE", "PYTHONNOUSERSITE")

_LAYOUT = re.compile(r"^(.*)/lib(?:64)?/(python3(?:\.\d+t?)?)/(?:site|dist)-packages$")


@dataclass(frozen=True)
class Interpreter:
    """A Python, by its own answers.

    Attributes:
        executable: its absolute path; behind a shim, that of the real one.
        version: such as ``3.12``, with a ``t`` if it is free-threaded.
        path: its module path, without the current directory.
        own: the directories that its packages are installed in.
        users: the directory of the user's packages, if it imports from there.
        shared: the system's directories of packages that it imports from.
    """

    executable: Path
    version: str
    path: list[str]
    own: list[Path]
    users: list[Path]
    shared: list[Path]

    def why_on_path(self, site: Path) -> str:
        """The reason why a directory that is not its own is on its path, as a phrase."""
        entries = [path for path in map(Path, self.path) if path.resolve() == site]
        if any(path.is_relative_to(own) for path in entries for own in self.own):
            return "a link leads there"
        if site in self.users:
            return "these are the user's packages"
        if site in self.shared:
            return "pyvenv.cfg has include-system-site-packages"
        return "a .pth file or sitecustomize leads there"


def ask(executable: Path, *flags: str) -> Interpreter:
    """Ask an interpreter about itself, in the current directory.

    Args:
        executable: its path.
        flags: options for it.

    Raises:
        OverlayError: it does not answer as a Python does.
    """
    message = "it gives no answer"
    kept = {k: v for k, v in os.environ.items() if k in _KEPT or not k.startswith("PYTHON")}
    try:
        child = subprocess.run(
            [str(executable), *flags, "-c", _ASK],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            env=kept,
        )
        message = child.stderr.decode(errors="replace").strip() or message
        answer = json.loads(answer_in(child.stdout))
        major, minor = answer["version"]
        users, shared = ([Path(p).resolve() for p in answer[k]] for k in ("users", "shared"))
        real = Path(answer["executable"] or "")
        return Interpreter(
            real if real.is_absolute() and os.access(real, os.X_OK) else executable,
            f"{major:d}.{minor:d}{'t' if answer['free'] else ''}",
            [str(path) for path in answer["path"]],
            [Path(answer["prefix"])] if answer["derived"] else [*shared, *users],
            users,
            shared,
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        message = (error.strerror or message) if isinstance(error, OSError) else message
        raise OverlayError(
            Exit.USAGE,
            f"does not run as a Python interpreter: {message}",
            subject=executable,
            next_step="name another with PYTHON=, or the directory with SITE=",
        ) from None


def answer_in(stdout: bytes) -> bytes:
    """The JSON that a program of ours wrote after :data:`MARK`; empty if it wrote none."""
    return stdout.rpartition(MARK)[2].partition(b"\n")[0] if MARK in stdout else b""


def of_directory(site: Path) -> Path | None:
    """The Python of the environment that ``site`` is in, or None if its path does not tell."""
    match = _LAYOUT.search(str(site))
    if not match:
        return None
    prefix, name = Path(match[1]), match[2]
    candidates = [prefix / "bin" / name]
    if (prefix / "pyvenv.cfg").is_file():
        candidates.insert(0, prefix / "bin" / "python")
    if prefix == Path("/usr/local"):  # Debian's Python in /usr/bin installs there.
        candidates.append(Path("/usr/bin", name))
    return next((path for path in candidates if path.exists()), None)


def command(python: str) -> Path:
    """The absolute path of an interpreter that is named by a path or a command.

    Raises:
        OverlayError: it cannot be run.
    """
    for folder in [""] if "/" in python else os.get_exec_path():
        candidate = Path(folder, python)
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return candidate.absolute()
    raise OverlayError(
        Exit.USAGE,
        "is not an interpreter that can be run",
        subject=python,
        next_step="name one: PYTHON=/path/to/python3",
    )


def for_directory(site: Path, executable: Path) -> Path:
    """The real interpreter behind ``executable``, which a person named for ``site``.

    Raises:
        OverlayError: it is another version than the directory is for, or too old.
    """
    try:
        asked = ask(executable, "-I", "-S")
    except OverlayError:
        return executable  # Unless something is compiled, as in most reverts, it is not needed.
    refuse_old(asked)
    layout = _LAYOUT.search(str(site.absolute())) or _LAYOUT.search(str(site.resolve()))
    wanted = layout[2].removeprefix("python") if layout else asked.version
    if wanted not in (asked.version, "3"):
        raise OverlayError(
            Exit.USAGE,
            f"is Python {asked.version}, and {site} is a directory of Python {wanted}",
            subject=asked.executable,
            next_step=f"name a Python {wanted}, or none (PYTHON may come from the environment)",
        )
    return asked.executable


def refuse_old(asked: Interpreter) -> None:
    """Raise if vLLM does not support the interpreter's version.

    Raises:
        OverlayError: it is too old.
    """
    major, minor = map(int, asked.version.rstrip("t").split("."))
    if (major, minor) < (3, 10):
        raise OverlayError(
            Exit.USAGE,
            f"is Python {asked.version}; vLLM needs 3.10 or newer",
            subject=asked.executable,
            next_step="name the Python that runs this vLLM",
        )
