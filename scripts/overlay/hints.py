"""Commands in messages, written so that they run as they stand.

Modules write a command between backquotes, without program and target (`apply`);
:func:`written` adds both.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

#: The checkout, the unpacked archive, or the package of the wheel.
HOME = Path(__file__).resolve().parents[2]
#: File in an archive and in a wheel with their version, which may have a label.
VERSION = "VERSION"
#: The wheel's command, and its package.
COMMAND, WHEEL = "readiness-overlay", "readiness_overlay"

#: Options that name the target of the running command, as the user gave them.
target: list[str] = []
#: Environment variable that named the target, if any.
named_by: str | None = None

_COMMAND = re.compile(r"`(apply|revert|status|verify|doctor|exec|diff)\b([^`]*)`")


def own_environment() -> str:
    """Return the state of the checkout's .venv if make chose it: ``incomplete`` or ``other``.

    `make apply` makes or completes the first. Empty for any other target.

    >>> own_environment()
    ''
    """
    return os.environ.get("READINESS_OWN_ENV", "")


def from_wheel() -> bool:
    """Return whether this tool was installed by its wheel.

    >>> from_wheel()
    False
    """
    return HOME.name == WHEEL


def program() -> str:
    """Return the command line that starts this tool, without a command.

    >>> program()
    'python3 /.../scripts/overlay'
    """
    if from_wheel():
        return f"python3 -m {WHEEL}" if sys.argv[0].endswith("__main__.py") else COMMAND
    return shlex.join(["python3", str(HOME / "scripts" / "overlay")])


def written(text: str) -> str:
    """Return a message with commands as the user writes them.

    >>> written("run `status`, or `patch -p1`")
    'run `python3 /.../scripts/overlay status`, or `patch -p1`'
    """

    def command(part: re.Match[str]) -> str:
        named = [] if re.search(r"--(venv|site|python)\b", part[2]) else target
        return f"`{' '.join([program(), part[1], *map(shlex.quote, named)])}{part[2]}`"

    return _COMMAND.sub(command, text)
