"""Options and argument types shared by the command lines."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from overlay.errors import Exit

_TARGET = """\
target (one of):
  --venv DIR      a virtual or conda environment; the default is the active one
  --site DIR      a site-packages, dist-packages or --target directory
  --python EXE    the vLLM that this interpreter imports;
                  with --site, the interpreter that imports from that directory
"""
_CODES = "exit codes:\n" + "".join(f"  {code.value}  {code.meaning}\n" for code in Exit)


def program(
    name: str, text: str
) -> tuple[argparse.ArgumentParser, argparse._SubParsersAction[argparse.ArgumentParser]]:
    """Create a program's parser; return it and the action that adds its subcommands.

    >>> parser, commands = program("tool", "Do something.")
    >>> _ = command(commands, "status", lambda args: 0, "show the state", target=False)
    >>> parser.parse_args(["status", "--json"]).json
    True
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
    """Add a command with the common options.

    ``run`` returns the exit code. ``text`` is the help line, in lower case. ``target`` adds the
    options that name an installation.

    >>> parser, commands = program("tool", "Do something.")
    >>> command(commands, "status", lambda args: 0, "show the state").description
    'Show the state.'
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
    """Argparse action that stores a value; ArgumentError if the option is repeated."""

    def __call__(
        self,
        _parser: argparse.ArgumentParser,
        args: argparse.Namespace,
        value: object,
        _option: str | None = None,
    ) -> None:
        """Store the value."""
        given = getattr(args, self.dest)
        if given != self.default:
            raise argparse.ArgumentError(self, f"is given twice: {given} and {value}")
        setattr(args, self.dest, value)
