"""The command line: arguments in, an exit code and one report out."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from overlay import commands, output
from overlay.commands import Options, Outcome
from overlay.errors import MEANING, Exit, OverlayError, denied
from overlay.installation import Installation, locate
from overlay.source import Overlay
from overlay.state import Inspection, State, refusal

# The author's commands are imported where they run: an entrypoint does not wait for them.
if TYPE_CHECKING:
    from overlay import author

#: The checkout, or the unpacked archive, that this tool is part of.
ROOT = Path(__file__).resolve().parents[2]

_TARGET = """\
target (one of):
  --venv DIR      a virtual or conda environment; the active one if nothing is named
  --site DIR      a site-packages, dist-packages or --target directory
  --python EXE    the vLLM that this interpreter would import;
                  with --site, the interpreter that runs that directory
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments, or None for the process's own.

    Returns:
        The exit code, one of :class:`~overlay.errors.Exit`.
    """
    args = _parser().parse_args(argv)
    try:
        run: Callable[[argparse.Namespace], int] = args.run
        return run(args)
    except OverlayError as error:
        return _fail(args, error)
    except KeyboardInterrupt:
        print(f"overlay {args.command}: interrupted; `status` says where", file=sys.stderr)
        return 130
    except OSError as error:
        return _fail(args, denied(error, "the run stopped there"))


def _parser() -> argparse.ArgumentParser:
    codes = "\n".join(f"  {code.value}  {MEANING[code]}" for code in Exit)
    parser = argparse.ArgumentParser(
        prog="overlay",
        description="Lay the readiness overlay over an installed vLLM, and take it off again.",
        epilog=f"{_TARGET}\nexit codes:\n{codes}\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    every = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")

    def command(
        name: str, run: Callable[[argparse.Namespace], int], text: str, target: bool = True
    ) -> argparse.ArgumentParser:
        sub = every.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=(f"{_TARGET}\n" if target else "") + f"exit codes:\n{codes}\n",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(run=run)
        sub.add_argument("--json", action="store_true", help="report as one JSON object")
        sub.add_argument("--dry-run", action="store_true", help="check everything, write nothing")
        if target:
            for option in ("--venv", "--site", "--python"):
                sub.add_argument(option, help=argparse.SUPPRESS)
        return sub

    for name, run, text in (
        ("apply", _apply, "lay the overlay over an installation, after checking every file"),
        ("revert", _revert, "give back upstream's files, RECORD included, byte for byte"),
    ):
        sub = command(name, run, text)
        sub.add_argument(
            "--force",
            action="store_true",
            default=os.environ.get("FORCE") == "1",
            help="go on although a process is serving from there (FORCE=1)",
        )
        sub.add_argument(
            "--wait",
            type=_seconds,
            default=Options.wait,
            metavar="SECONDS",
            help="how long to wait for another run (default: %(default)g)",
        )
        sub.add_argument("--verbose", action="store_true", help="name every file")
    sub = command("status", _status, "say what state the installation is in")
    sub.add_argument("--verbose", action="store_true", help="name every file")
    command("verify", _verify, "say nothing if the overlay is whole, or what is wrong in one line")
    sub = command("diff", _diff, "show what the overlay changes in upstream's files")
    lines = sub.add_mutually_exclusive_group()
    lines.add_argument("--context", type=_count, default=12, help="lines around each change")
    lines.add_argument("--full", action="store_true", help="show whole files")
    sub.add_argument("--added", action="store_true", help="show the overlay's own files, too")
    for name, run, text, wheel in (
        ("vendor", _vendor, "build the vendored copies into vendor_overlay/", True),
        ("edit", _edit, "lay out the series as commits of a git tree in build/edit", True),
        ("refresh", _refresh, "write patches and checksums from build/edit", False),
        ("dist", _dist, "build the reproducible archive of HEAD in build/dist", True),
    ):
        sub = command(name, run, text, target=wheel)
        if wheel:
            sub.add_argument("--wheel", help="take upstream's files from this pinned wheel instead")
    return parser


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to 1e9")
    return value


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of lines")
    return int(text)


def installation(args: argparse.Namespace) -> Installation:
    """The installation that the arguments name, or the active environment's.

    Args:
        args: gets ``named_by``, the variable that named it, or None.

    Raises:
        OverlayError: as for :func:`~overlay.installation.locate`.
    """
    prefix, site, python, passed_over = args.venv, args.site, args.python, None
    if prefix is site is python is None:
        args.named_by, prefix, passed_over = _active()
    else:
        # The Makefile knows which of these it did not get from its own command line.
        args.named_by = os.environ.get("READINESS_NAMED_BY") or None
    try:
        return locate(prefix, site, python)
    except OverlayError as error:
        if passed_over:
            error.reason += f"; {passed_over}"
        if args.named_by:
            error.named_by = args.named_by
            error.next_step += f"; or unset {args.named_by}"
        raise


def _active() -> tuple[str | None, str | None, str | None]:
    """The active environment: its variable, its directory, and why conda's is not it."""
    venv, conda = os.environ.get("VIRTUAL_ENV"), os.environ.get("CONDA_PREFIX")
    base = os.environ.get("CONDA_DEFAULT_ENV") == "base"
    if not conda or (venv and (base or conda == venv)):
        return ("VIRTUAL_ENV", venv, None) if venv else (None, None, None)
    if venv:
        return "VIRTUAL_ENV", venv, f"VIRTUAL_ENV goes before CONDA_PREFIX={conda}"
    if base:
        return None, None, f"conda's base environment ({conda}) is only changed if it is named"
    if not Path(conda, "bin", "python").exists():
        return None, None, f"CONDA_PREFIX={conda} holds no Python"
    return "CONDA_PREFIX", conda, None


def _say(text: str) -> None:
    """Print one line of a report."""
    print(output.escaped(text))


def _apply(args: argparse.Namespace) -> int:
    return _change(args, commands.apply, "overlaid")


def _revert(args: argparse.Namespace) -> int:
    return _change(args, commands.revert, "reverted")


def _change(
    args: argparse.Namespace,
    change: Callable[[Installation, Overlay, Options], Outcome],
    done: str,
) -> int:
    options = Options(args.dry_run, args.force, args.wait)
    outcome = change(installation(args), Overlay.load(ROOT), options)
    if args.json:
        _print_json(args, outcome, Exit.DONE)
        return Exit.DONE
    found = outcome.inspection
    _head(found)
    if outcome.changed:
        verb = f"would be {done}" if args.dry_run else done
        _say(f"{len(outcome.changed)} files {verb}, digest {found.digest[:12]}")
    for note in outcome.notes:
        _say(f"note: {note}")
    for path in outcome.changed if args.verbose else []:
        _say(f"  {path}")
    return Exit.DONE


def _status(args: argparse.Namespace) -> int:
    outcome = commands.status(installation(args), Overlay.load(ROOT))
    found = outcome.inspection
    problem = commands.problem(found, want_overlaid=False)
    code = problem.code if problem else Exit.DONE
    if args.json:
        _print_json(args, outcome, code, problem)
        return code
    _head(found)
    _say(f"overlay {found.overlay.pin.overlay}, digest {found.digest}")
    seen = found.recorded or found
    states = [file.state for file in seen.files]
    counts = {state: states.count(state) for state in State if state in states}
    _say(f"{len(states)} files: " + ", ".join(f"{n} {s.value}" for s, n in counts.items()))
    usual = max((State.PRISTINE, State.OVERLAID), key=states.count)
    for file in seen.files:
        if args.verbose or file.state is not usual:
            _say(f"  {file.state.value:<9} {file.path}")
        if file.state in (State.FOREIGN, State.MISSING):
            error = refusal(found, [file])
            for name, text in (("expected", error.expected), ("found", error.found)):
                if text:
                    _say(f"            {name:<9} {text}")
            _say(f"            {'next':<9} {error.next_step}")
    if seen.record and (args.verbose or seen.record is not usual):
        _say(f"  {seen.record.value:<9} RECORD")
    for what, paths in (("left over", seen.leftovers), ("stale", seen.stale)):
        for path in paths:
            _say(f"  {what:<9} {path}")
    if problem and seen.state is not State.FOREIGN:
        _say(f"next: {problem.next_step}")
    return code


def _verify(args: argparse.Namespace) -> int:
    problem: OverlayError | None
    try:
        outcome = commands.status(installation(args), Overlay.load(ROOT))
        problem = commands.problem(outcome.inspection, want_overlaid=True)
    except OverlayError as error:
        problem = error
        if args.json:
            _fail(args, error)
    else:
        if args.json:
            _print_json(args, outcome, problem.code if problem else Exit.DONE, problem)
    if problem is None:
        return Exit.DONE
    problem.named_by = getattr(args, "named_by", None)
    # Where this fails in a container, the line may be all of its log.
    print(f"overlay verify: {problem.line}", file=sys.stderr)
    return problem.code


def _diff(args: argparse.Namespace) -> int:
    context = None if args.full else args.context
    lines = commands.diff(installation(args), Overlay.load(ROOT), context, args.added)
    if args.json:
        print(json.dumps({"command": "diff", "diff": "".join(lines)}))
    else:
        # The bytes of the files, whatever the encoding of the terminal is.
        sys.stdout.flush()
        for line in lines:
            sys.stdout.buffer.write(line.encode(errors="surrogateescape"))
        sys.stdout.buffer.flush()
    # What was not shown was not done: showing is all that this is for.
    return Exit.DENIED if output.lost() else Exit.DONE


def _vendor(args: argparse.Namespace) -> int:
    from overlay import author

    overlay = Overlay.load(ROOT)
    return _wrote(args, author.vendor(overlay, _upstream(args, overlay), args.dry_run))


def _edit(args: argparse.Namespace) -> int:
    from overlay import author

    overlay = author.load_unproven(ROOT)
    return _wrote(args, author.edit(overlay, _upstream(args, overlay), args.dry_run))


def _refresh(args: argparse.Namespace) -> int:
    from overlay import author

    return _wrote(args, author.refresh(ROOT, args.dry_run))


def _dist(args: argparse.Namespace) -> int:
    from overlay import author

    return _wrote(args, author.dist(ROOT, lambda head: _upstream(args, head), args.dry_run))


def _upstream(args: argparse.Namespace, overlay: Overlay) -> author.Upstream:
    from overlay import author

    if args.wheel:
        return author.from_wheel(Path(args.wheel), overlay)
    return author.from_installation(installation(args), overlay)


def _wrote(args: argparse.Namespace, files: Sequence[str]) -> int:
    if args.json:
        print(json.dumps({"command": args.command, "dry_run": args.dry_run, "files": list(files)}))
        return Exit.DONE
    for file in files:
        _say(f"{'would write' if args.dry_run else 'wrote'} {file}")
    if not files:
        _say("nothing to do: everything is as it should be")
    return Exit.DONE


def _head(found: Inspection) -> None:
    installation = found.installation
    state = found.state.value
    if found.recorded:
        by = "by" if found.other else "to"
        state = f"{found.recorded.state.value} {by} overlay {found.older}"
    _say(f"{installation.site}: {installation.title}, {state}")


def _print_json(
    args: argparse.Namespace, outcome: Outcome, code: Exit, problem: OverlayError | None = None
) -> None:
    found = outcome.inspection
    installation = found.installation
    report = {
        "command": args.command,
        "dry_run": args.dry_run,
        "code": int(code),
        "site": str(installation.site),
        "distribution": installation.distribution,
        "version": installation.version,
        "interpreter": installation.interpreter and str(installation.interpreter),
        "overlay": found.overlay.pin.overlay,
        "release": found.overlay.pin.release,
        "state": found.state.value,
        "digest": found.digest,
        "files": [
            {"path": file.path, "state": file.state.value, "sha256": file.sha256}
            for file in found.files
        ],
        "record": found.record and found.record.value,
        "leftovers": found.leftovers,
        "stale": found.stale,
        "changed": outcome.changed,
        "notes": outcome.notes,
        "error": problem and problem.to_json(),
    }
    print(json.dumps(report))


def _fail(args: argparse.Namespace, error: OverlayError) -> int:
    error.named_by = getattr(args, "named_by", None)
    if args.json:
        report = {"command": args.command, "code": int(error.code), "error": error.to_json()}
        if error.code is Exit.ABSENT:
            report["state"] = State.ABSENT.value
        print(json.dumps(report))
    else:
        print(f"overlay {args.command}: {error}", file=sys.stderr)
    return error.code
