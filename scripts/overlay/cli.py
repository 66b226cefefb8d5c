"""Command line: parse the arguments, run one command, print its report."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from overlay import arguments, commands, hints, output, parts
from overlay.arguments import command, program
from overlay.commands import Options, Outcome
from overlay.errors import Exit, OverlayError, denied, usage
from overlay.files import head
from overlay.installation import Installation, locate
from overlay.refusal import refusal
from overlay.source import PIN, Overlay
from overlay.state import Inspection, State

#: The copy of the overlay that is applied.
ROOT = hints.HOME
#: First word of messages.
_NAME = hints.COMMAND if hints.from_wheel() else "overlay"
_TARGET = ("venv", "site", "python")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, by default from ``sys.argv``.

    Returns:
        The exit code, one of :class:`~overlay.errors.Exit`.

    >>> main(["status", "--site=site"])
    /...: vllm 0.22.0, pristine
    ...
    <Exit.DONE: 0>
    """
    given = list(sys.argv[1:] if argv is None else argv)
    words = []
    if given[:1] == ["exec"] and "--" in given:
        # Split before parsing, because argparse would also parse the options behind --.
        end = given.index("--")
        given, words = given[:end], given[end + 1 :]
    return run(_parser(words), given)


def run(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    """Run the command named by the arguments, report errors, and return the exit code.

    >>> parser, commands = program("tool", "Do something.")
    >>> _ = command(commands, "fail", lambda args: Exit.FAULT, "fail")
    >>> run(parser, ["fail"])
    <Exit.FAULT: 1>
    """
    args = parser.parse_args(argv)
    hints.target = [f"--{name}={value}" for name in _TARGET if (value := vars(args).get(name))]
    hints.named_by = None
    try:
        body: Callable[[argparse.Namespace], int] = args.run
        return body(args)
    except OverlayError as error:
        return _fail(args, error)
    except OSError as error:
        return _fail(args, denied(error, "the run stopped at this error"))


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Build the parser; ``words`` is the command line after ``exec --``."""
    parser, every = program(
        _NAME, "Apply the readiness overlay to an installed vLLM, and revert it."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the overlay's version")
    applies = "apply the overlay to an installation, after checking every file"
    reverts = "restore upstream's files, RECORD included, byte for byte"
    for name, change, done, text in (
        ("apply", commands.apply, "overlaid", applies),
        ("revert", commands.revert, "reverted", reverts),
    ):
        sub = command(every, name, partial(_change, change=change, done=done), text)
        sub.add_argument(
            "--force",
            action="store_true",
            default=os.environ.get("FORCE") == "1",
            help="proceed even if a process serves from the installation (FORCE=1)",
        )
        sub.add_argument(
            "--wait",
            type=float,
            default=Options.wait,
            metavar="SECONDS",
            help="how long to wait for another run (default: %(default)g)",
        )
    sub = command(every, "status", _status, "show the state of the installation")
    sub.add_argument("--verbose", action="store_true", help="name every file")
    whole = "succeed silently if the overlay is whole, else print the reason"
    gate = "fail unless the installation has this digest"
    sub = command(every, "verify", _verify, whole)
    sub.add_argument("--digest", action=arguments.Once, metavar="HEX", help=gate)
    sub = command(every, "exec", _exec, "verify, then run the command after -- in this process")
    sub.usage = f"{hints.program()} exec [options] -- COMMAND [ARGUMENT ...]"
    sub.set_defaults(words=words)
    sub.add_argument("--digest", action=arguments.Once, metavar="HEX", help=gate)
    command(
        every, "doctor", _doctor, "report the installation, its processes, and the effect of apply"
    )
    command(every, "diff", _diff, "show the overlay's changes to upstream's files")
    parser.set_defaults(leave=[], extra=None, allow_downgrade=False)
    leave = "leave this file unchanged, for example vllm/v1/sample/sampler.py"
    older = "let apply replace a newer version of the overlay"
    for name, sub in every.choices.items():
        if name in ("apply", "doctor"):
            sub.add_argument("--allow-downgrade", action="store_true", help=older)
        if name != "revert":
            group = sub.add_argument_group("selection")
            group.add_argument("--leave", metavar="FILE", action="append", default=[], help=leave)
            group.add_argument(
                "--extra", action=arguments.Once, metavar="DIR", help="your own patches"
            )
    return parser


class _Version(argparse.Action):
    """Argparse action that prints the version of this copy, and ends the run."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print the version: an archive's or a wheel's own, else that of VERSION_PIN."""
        try:
            pin = Overlay.unproven(ROOT).pin
        except OverlayError as error:
            parser.exit(error.code, f"{parser.prog}: {error}\n")
        version = head(ROOT / hints.VERSION, 100).decode(errors="replace").strip() or pin.overlay
        _say(f"{parser.prog} {version} for vLLM {pin.release}")
        parser.exit()


def _choice(args: argparse.Namespace) -> parts.Choice:
    """Return the choice in a command's arguments."""
    applies = args.command in ("apply", "doctor")
    return parts.Choice(tuple(args.leave), args.extra, keep=not applies)


def installation(args: argparse.Namespace) -> Installation:
    """Locate the installation that the arguments or the active environment name.

    Sets :data:`hints.named_by`. The wheel's command takes the environment that it runs from before
    the active one, if that has a vLLM, and says on stderr which one a command changes.

    Raises:
        OverlayError: as for :func:`~overlay.installation.locate`.

    >>> installation(argparse.Namespace(venv=None, site="site", python=None)).title
    'vllm 0.22.0'
    """
    prefix, site, python = args.venv, args.site, args.python
    hints.named_by, chosen_by = None, ""
    if prefix is not None or site is not None or python is not None:
        # Set by the Makefile if the option's value came from an environment variable.
        hints.named_by = os.environ.get("READINESS_NAMED_BY") or None
    elif hints.from_wheel() and _runs_beside_vllm():
        python, chosen_by = sys.executable, "this command runs from it"
    else:
        hints.named_by, prefix = _active()
        chosen_by = f"named by {hints.named_by}"
    try:
        found = locate(prefix, site, python)
        if hints.from_wheel() and chosen_by and args.command in ("apply", "revert"):
            line = f"{_NAME} {args.command}: {prefix or sys.prefix} ({chosen_by})"
            print(output.escaped(line), file=sys.stderr)
        return found
    except OverlayError as error:
        if hints.named_by:
            error.next_step += f"; or unset {hints.named_by}"
        # A gate that names nothing, and finds nothing, has found no vLLM.
        gate = vars(args).get("command") in ("verify", "exec") and not (prefix or site or python)
        if error.code is Exit.USAGE and (gate or hints.own_environment()):
            raise OverlayError(
                Exit.ABSENT, error.reason, subject=error.subject, next_step=error.next_step
            ) from None
        raise


def _runs_beside_vllm() -> bool:
    """Return whether vLLM is in the environment of this process."""
    libraries = (path for path in sys.path if path.endswith("-packages"))
    return any(os.path.isdir(os.path.join(path, "vllm")) for path in libraries)


def _active() -> tuple[str | None, str | None]:
    """Return the active environment's variable and directory.

    A virtual environment takes precedence over conda's; conda's base is used only if it is named.
    """
    venv, conda = os.environ.get("VIRTUAL_ENV"), os.environ.get("CONDA_PREFIX")
    if venv:
        return "VIRTUAL_ENV", venv
    base = os.environ.get("CONDA_DEFAULT_ENV") == "base"
    if conda and not base and Path(conda, "bin", "python").exists():
        return "CONDA_PREFIX", conda
    return None, None


def _survey(args: argparse.Namespace) -> Inspection:
    """Compare the named installation with the chosen part of the overlay."""
    return parts.survey(installation(args), Overlay.load(ROOT), _choice(args))


def _say(text: str) -> None:
    """Print one line of a report."""
    print(output.escaped(text))


def _change(
    args: argparse.Namespace, change: Callable[[Installation, Overlay, Options], Outcome], done: str
) -> int:
    if not args.wait >= 0:  # nor a NaN
        raise usage(f"--wait={args.wait:g} is no time", "give seconds, 0 or more")
    options = Options(args.dry_run, args.force, args.wait, _choice(args), args.allow_downgrade)
    outcome = change(installation(args), Overlay.load(ROOT), options)
    if args.json:
        _print_json(args, outcome)
        return Exit.DONE
    inspection = outcome.inspection
    _head(inspection)
    if outcome.changed:
        _say(f"{len(outcome.changed)} files {'would be ' if args.dry_run else ''}{done}")
    for note in outcome.notes:
        _say(f"note: {note}")
    if outcome.digest_after:
        _say(f"digest{' after apply' if args.dry_run else ''}: {outcome.digest_after}")
    return Exit.DONE


def _status(args: argparse.Namespace) -> int:
    inspection = _survey(args)
    problem = commands.problem(inspection, want_overlaid=False)
    code = problem.code if problem else Exit.DONE
    if args.json:
        _print_json(args, Outcome(inspection), problem)
        return code
    _head(inspection)
    compared = inspection.compared
    version = "" if compared.unknown else f"overlay {compared.overlay.pin.overlay}, "
    _say(f"{version}digest {compared.digest}")
    for line in parts.lines(compared.overlay):
        _say(line)
    _files(inspection, compared, args.verbose)
    if problem and (compared.unknown or inspection.beyond):
        _say(f"why: {problem.subject}: {problem.reason}")
    if problem and (compared.unknown or compared.state is not State.FOREIGN):
        _say(f"next: {problem.next_step}")
    on = any(file.state is State.OVERLAID for file in compared.files)
    if on and hints.HOME.parent == inspection.installation.site:
        _say(hints.written(f"note: uninstalling {_NAME} leaves the overlay on: `revert` first"))
    return code


def _files(inspection: Inspection, compared: Inspection, every: bool) -> None:
    """Print the files in an unexpected state, or every file."""
    states = [file.state for file in compared.files]
    counts = {state: states.count(state) for state in State if state in states}
    _say(f"{len(states)} files: " + ", ".join(f"{n} {s.value}" for s, n in counts.items()))
    usual = max((State.PRISTINE, State.OVERLAID), key=states.count)
    for file in compared.files:
        if every or (file.state is not usual and not compared.unknown):
            _say(f"  {file.state.value:<9} {file.path}")
        # Single files of an unknown version cannot be explained.
        if file.state in (State.FOREIGN, State.MISSING) and not compared.unknown:
            error = refusal(inspection, [file])
            expected = [f"expected {error.expected}"] if error.expected else []
            for text in (*expected, f"found {error.found}"):
                _say(f"            {text}")
            _say(f"            next: {error.next_step}")
    if compared.record and (every or compared.record is not usual):
        _say(f"  {compared.record.value:<9} RECORD")
    for path in compared.leftovers:
        _say(f"  left over {path}")
    for path in compared.stale:
        _say(f"  not the bytecode of its source: {path}")


def _verify(args: argparse.Namespace) -> int:
    if args.digest is not None and not re.fullmatch("[0-9a-fA-F]{64}", args.digest):
        next_step = "give the 64 hexadecimal digits that `status` prints"
        raise usage(f"--digest={args.digest} is not a digest", next_step)
    inspection = _survey(args)
    args.found = inspection.installation
    problem = commands.problem(inspection, want_overlaid=True)
    if problem is None and args.digest:
        problem = commands.wrong_digest(inspection, args.digest.lower())
    # stdout of `exec` belongs to its command.
    if args.json and (problem or args.command == "verify"):
        _print_json(args, Outcome(inspection), problem)
    if problem:
        print(f"{_NAME} {args.command}: {problem.line}", file=sys.stderr)
    return problem.code if problem else Exit.DONE


def _exec(args: argparse.Namespace) -> int:
    if not args.words:
        raise usage("exec needs a command", "name it after --: `exec -- vllm serve MODEL`")
    if code := _verify(args):
        return code
    if problem := commands.wrong_variable(ROOT):
        print(f"{_NAME} exec: {output.escaped(problem)}", file=sys.stderr)
        return Exit.USAGE
    if args.dry_run:
        return Exit.DONE
    return commands.become(args.words, args.found.interpreter)


def _doctor(args: argparse.Namespace) -> int:
    """Print the findings; return the exit code that `apply` would have."""
    target, overlay = installation(args), Overlay.load(ROOT)
    options = Options(dry_run=True, choice=_choice(args), downgrade=args.allow_downgrade)
    diagnosis = commands.diagnose(target, overlay, options)
    if args.json:
        seen = diagnosis.inspection
        facts = {
            **_place(target, overlay),
            "state": seen and seen.condition.value,
            "installed": seen and _installed(seen),
            "digest": seen and seen.compared.digest,
            "digest_after": diagnosis.digest_after,
            "findings": [{"about": about, "text": text} for about, text in diagnosis.findings],
        }
        _print_facts(args, facts, diagnosis.error)
    else:
        for about, text in diagnosis.findings:
            _say(f"{about:<9} {text}")
    return diagnosis.error.code if diagnosis.error else Exit.DONE


def _diff(args: argparse.Namespace) -> int:
    lines = commands.diff(_survey(args))
    if args.json:
        print(json.dumps({"command": "diff", "diff": "".join(lines)}))
    else:
        # Write the files' bytes unchanged, whatever the terminal's encoding.
        sys.stdout.flush()
        for line in lines:
            sys.stdout.buffer.write(line.encode(errors="surrogateescape"))
        sys.stdout.buffer.flush()
    # The output is the command's result, so lost output is a failure.
    return Exit.DENIED if output.lost() else Exit.DONE


def _head(inspection: Inspection) -> None:
    installation = inspection.installation
    _say(f"{installation.site}: {installation.title}, {inspection.described}")


def _print_json(
    args: argparse.Namespace, outcome: Outcome, problem: OverlayError | None = None
) -> None:
    inspection = outcome.inspection
    compared = inspection.compared
    facts = {
        "dry_run": args.dry_run,
        **_place(inspection.installation, inspection.overlay),
        "left_out": list(compared.overlay.pin.without),
        "extra": parts.described(compared.overlay),
        "state": inspection.condition.value,
        "installed": _installed(inspection),
        "digest": compared.digest,
        "files": [
            {"path": file.path, "state": file.state.value, "sha256": file.sha256}
            for file in (*compared.files, *inspection.beyond)
        ],
        "record": compared.record and compared.record.value,
        "leftovers": compared.leftovers,
        "stale": compared.stale,
        "changed": outcome.changed,
        "digest_after": outcome.digest_after,
        "notes": outcome.notes,
    }
    _print_facts(args, facts, problem)


def _place(target: Installation, overlay: Overlay) -> Mapping[str, str | None]:
    """Return the installation, this copy of the overlay, and the release that it is for."""
    return {
        "site": str(target.site),
        "distribution": target.distribution,
        "version": target.version,
        "interpreter": str(target.interpreter) if target.interpreter else None,
        "overlay": overlay.pin.overlay,
        "release": overlay.pin.release,
    }


def _installed(inspection: Inspection) -> Mapping[str, str] | None:
    """Return the installed version, its digest and its state; None if none could be checked."""
    compared = inspection.compared
    checked = inspection.condition is not State.FOREIGN
    if not checked or compared.file(PIN).state is not State.OVERLAID:
        return None
    version, state = compared.overlay.pin.overlay, compared.state.value
    return {"version": version, "digest": compared.digest, "state": state}


def _print_facts(
    args: argparse.Namespace, facts: Mapping[str, object], error: OverlayError | None
) -> None:
    code = int(error.code if error else Exit.DONE)
    report = {"host": platform.node(), "command": args.command, "code": code, **facts}
    print(json.dumps({**report, "error": error and error.to_json()}))


def _fail(args: argparse.Namespace, error: OverlayError) -> int:
    # In a container this line may be the whole log.
    brief = args.command in ("verify", "exec")
    if args.json:
        absent = error.code is Exit.ABSENT
        _print_facts(args, {"state": State.ABSENT.value} if absent else {}, error)
    if brief or not args.json:
        text = error.line if brief else error
        print(f"{args.program} {args.command}: {text}", file=sys.stderr)
    return error.code
