"""Commands in messages, written as the user started the tool.

Modules write a command between backquotes, without program and target (`apply`), and options as
flags. :func:`written` adds the program and the target, and writes make's variables for make.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

#: The checkout, the unpacked archive, or the package of the wheel.
HOME = Path(__file__).resolve().parents[2]
#: The wheel's command, and its package.
COMMAND, WHEEL = "readiness-overlay", "readiness_overlay"
#: Set by the Makefile: ``make``, or ``make .venv`` if no target is named and none is active.
STARTED_BY = "READINESS_STARTED_BY"

#: Options that name the target of the running command, as the user gave them.
target: list[str] = []

_PART = re.compile(
    r"`(?:(?P<verb>apply|revert|status|verify|doctor|exec|diff)\b(?P<rest>[^`]*)|[^`]*)`"
    r"|--(?P<option>venv|site|python|leave|extra|force)\b=?"
)


def from_wheel() -> bool:
    """Return whether this tool was installed by its wheel."""
    return HOME.name == WHEEL


def program() -> str:
    """Return the command line that starts this tool, without a command."""
    started = Path(sys.argv[0])
    as_module = started.name == "__main__.py"
    if from_wheel():
        return f"python3 -m {WHEEL}" if as_module else COMMAND
    if as_module and started.parent == HOME / "scripts" / "overlay":
        return "python3 -m overlay"
    return shlex.join(["python3", str(HOME / "scripts" / "overlay")])


def command(verb: str, rest: str = "") -> str:
    """Return the command line of a command on the present target; ``rest`` are more options."""
    named = [] if re.search(r"--(venv|site|python)\b", rest) else target
    by, _, default = os.environ.get(STARTED_BY, "").partition(" ")
    if not by or verb == "exec":
        return " ".join([program(), verb, *map(shlex.quote, named)]) + rest
    words = ([] if default else named) + shlex.split(rest)
    flags = [word for word in words if word.startswith("--leave=")]
    flags = flags if len(flags) > 1 else []
    flags += [word for word in words if not re.match(r"--\w+=", word)]
    variables = [word.removeprefix("--").partition("=") for word in words if word not in flags]
    line = [by, verb, *(f"{name.upper()}={value}" for name, _, value in variables)]
    return shlex.join([*line, *([f"ARGS={shlex.join(flags)}"] if flags else [])])


def written(text: str) -> str:
    """Return a message with commands and options as the user writes them."""

    def write(part: re.Match[str]) -> str:
        if part["verb"]:
            return f"`{command(part['verb'], part['rest'])}`"
        if part["option"] and os.environ.get(STARTED_BY):
            return "FORCE=1" if part["option"] == "force" else f"{part['option'].upper()}="
        return part[0]

    return _PART.sub(write, text)
