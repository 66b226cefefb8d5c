"""What the programs' command lines have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from overlay.errors import MEANING, Exit

_TARGET = """\
target (one of):
  --venv DIR      a virtual or conda environment; the active one if nothing is named
  --site DIR      a site-packages, dist-packages or --target directory
  --python EXE    the vLLM that this interpreter would import;
                  with --site, the interpreter that runs that directory
"""
_CODES = "exit codes:\n" + "".join(f"  {code.value}  {MEANING[code]}\n" for code in Exit)


def program(
    name: str, text: str
) -> tuple[argparse.ArgumentParser, argparse._SubParsersAction[argparse.ArgumentParser]]:
    """A parser for a program of several commands, and the action that commands are added to.

    Args:
        name: the program's.
        text: one sentence on what it does.
    """
    parser = argparse.ArgumentParser(
        prog=name,
        description=text,
        epilog=f"{_TARGET}\n{_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(program=name)
    return parser, parser.add_subparsers(metavar="COMMAND", required=True, dest="command")


def command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    text: str,
    target: bool = True,
) -> argparse.ArgumentParser:
    """Add a command, with the options that every command has.

    Args:
        commands: of :func:`program`.
        name: the command's.
        run: carries it out, and returns the exit code.
        text: a line for the help, in lower case.
        target: whether it takes the options that name an installation.
    """
    sub = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=(f"{_TARGET}\n" if target else "") + _CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sub.set_defaults(run=run)
    sub.add_argument("--json", action="store_true", help="report as one JSON object")
    sub.add_argument("--dry-run", action="store_true", help="check everything, write nothing")
    for option in ("--venv", "--site", "--python") if target else ():
        sub.add_argument(option, action=Once, help=argparse.SUPPRESS)
    return sub


class Once(argparse.Action):
    """Stores the value of an option that is named once: of two, neither may be dropped."""

    def __call__(
        self,
        _parser: argparse.ArgumentParser,
        args: argparse.Namespace,
        value: object,
        _option: str | None = None,
    ) -> None:
        """Store the value.

        Raises:
            ArgumentError: the option was named before.
        """
        named = vars(args).setdefault("named_once", {})
        if self.dest in named:
            raise argparse.ArgumentError(self, f"is named twice: {named[self.dest]} and {value}")
        named[self.dest] = value
        setattr(args, self.dest, value)


def seconds(text: str) -> float:
    """The type of an argument that is a time in seconds."""
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to 1e9")
    return value


def count(text: str) -> int:
    """The type of an argument that is a number of lines."""
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of lines")
    return int(text)
