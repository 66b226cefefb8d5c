"""Commands: apply, revert, status, verify, exec, diff and doctor."""

from __future__ import annotations

import difflib
import errno
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from overlay.errors import Exit, OverlayError, usage
from overlay.install import exclusive, lay_over, produce, refuse_unwritable, take_off
from overlay.installation import Installation
from overlay.interpreter import MARK, NoAnswer, answer
from overlay.parts import Choice, lines, recognise, survey
from overlay.processes import serving
from overlay.refusal import laying, refuse_foreign
from overlay.source import Overlay
from overlay.state import Inspection, State, inspect

#: Reads every variable with the runtime's own readers. Without site-packages on the path, ``vllm``
#: is a namespace package that holds the runtime alone.
_READ = f"""
import json, os, sys
sys.path.insert(0, json.load(sys.stdin))
from vllm.v1.readiness.engine import switch
problem = None
try:
    for read in switch.VARIABLES.values():
        read()
except switch.VariableError as error:
    problem = str(error)
os.write(1, {MARK!r} + json.dumps(problem).encode() + b"\\n")
"""
#: Choice of the whole overlay.
WHOLE = Choice()


@dataclass
class Outcome:
    """Result of a command.

    ``inspection`` is the state after the command, or the unchanged state after a dry run.
    ``changed`` lists paths relative to site-packages. ``digest_after`` is the digest that `apply`
    gives, also in a dry run; None for other commands.
    """

    inspection: Inspection
    changed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    digest_after: str | None = None


@dataclass(frozen=True)
class Options:
    """Options of a command that writes.

    ``wait`` is the timeout for another run, in seconds. ``downgrade`` lets `apply` replace a newer
    version.
    """

    dry_run: bool = False
    force: bool = False
    wait: float = 30.0
    choice: Choice = WHOLE
    downgrade: bool = False


def apply(installation: Installation, overlay: Overlay, options: Options) -> Outcome:
    """Apply the chosen part of ``overlay``, or complete an interrupted run.

    Another version or part of the overlay is taken off first. If applying then fails,
    the installation is left without an overlay.

    Raises:
        OverlayError: refused, and nothing was written; or failed while files were renamed, and the
            installation is partial.

    >>> apply(vllm, small, Options(force=True)).inspection.state
    <State.OVERLAID: 'overlaid'>
    """
    with exclusive(installation.site, options.wait) as lock:
        inspection = survey(installation, overlay, options.choice)
        overlay, installed = inspection.overlay, inspection.replaceable
        notes = [*lines(overlay)]
        if installed:
            version = f"overlay {inspection.installed_version}"
            notes.append(
                f"replaces {version} with overlay {overlay.pin.overlay}{overlay.selection}"
            )
            if inspection.beyond or (inspection.downgrades and not options.downgrade):
                refuse_foreign(inspection)
            changed = sorted(inspection.paths | installed.paths)
        else:
            refuse_foreign(inspection)
            if inspection.state is State.OVERLAID:
                notes = ["nothing to do: already overlaid", *notes]
                return Outcome(inspection, [], notes, overlay.digest)
            changed = [f.path for f in inspection.files if f.state is not State.OVERLAID]
            changed += [os.path.relpath(pyc, installation.site) for pyc in inspection.stale]
        if installation.interpreter is None:
            notes.append("no interpreter found: the first import compiles the bytecode")
        if installation.record is None:
            notes.append("there is no RECORD: revert before you uninstall or replace vLLM")
        refuse_unwritable(installed or inspection, changed, options.force)
        if options.dry_run or installed:
            produce(inspection)
        if options.dry_run:
            return Outcome(inspection, changed, notes, overlay.digest)
        if installed:
            take_off(installed, lock)
            inspection = inspect(installation, overlay)
            refuse_foreign(inspection)
        try:
            lay_over(inspection, lock)
        except OverlayError as error:
            if installed:
                reason = error.reason.removesuffix("; nothing was written")
                error.reason = f"{version} was removed, and this one is not applied: {reason}"
            raise
        return Outcome(inspect(installation, overlay), changed, notes, overlay.digest)


def revert(installation: Installation, overlay: Overlay, options: Options) -> Outcome:
    """Restore upstream's files in an overlaid or partial installation.

    Any version of the overlay can be reverted if its provenance is installed and trusted.

    Raises:
        OverlayError: as for :func:`apply`.

    >>> revert(vllm, small, Options(force=True)).notes
    ['nothing to do: already pristine']
    """
    with exclusive(installation.site, options.wait) as lock:
        inspection = recognise(installation, overlay)
        notes = []
        if installed := inspection.replaceable:
            notes.append(f"removes overlay {inspection.installed_version}")
        else:
            refuse_foreign(inspection)
            if inspection.state is State.PRISTINE:
                return Outcome(inspection, notes=["nothing to do: already pristine"])
        source = installed or inspection
        changed = [f.path for f in source.files if f.state is State.OVERLAID]
        changed += [os.path.relpath(pyc, installation.site) for pyc in source.stale]
        refuse_unwritable(source, changed, options.force)
        if options.dry_run:
            for path in source.overlay.targets:
                source.pristine(path)
        else:
            take_off(source, lock)
            # Files that the reverted version did not change may be foreign.
            inspection = inspect(installation, source.overlay)
            refuse_foreign(inspection)
            whole = inspect(installation, overlay)
            inspection = inspection if whole.state is State.FOREIGN else whole
        return Outcome(inspection, changed, notes)


def problem(inspection: Inspection, want_overlaid: bool) -> OverlayError | None:
    """Return the error that ``status`` or ``verify`` reports; None without one.

    With ``want_overlaid`` a pristine installation is an error.

    >>> problem(inspect(vllm, small), want_overlaid=True).code
    <Exit.PRISTINE: 9>
    """
    try:
        refuse_foreign(inspection)
    except OverlayError as error:
        return error
    if inspection.state is State.PARTIAL:
        code, reason = Exit.PARTIAL, "a run was interrupted"
        next_step = f"{laying(inspection)} completes it, `revert` undoes it"
        if inspection.stale:
            reason = f"{inspection.stale[0]} is not the bytecode of its source"
            next_step = f"{laying(inspection)} compiles it again, `revert` removes both"
    elif inspection.state is State.PRISTINE and want_overlaid:
        code, reason = Exit.PRISTINE, "the overlay is not applied"
        next_step = f"run {laying(inspection)}"
    else:
        return None
    reason = f"{inspection.installation.title} is {inspection.state.value}: {reason}"
    return OverlayError(code, reason, subject=inspection.installation.site, next_step=next_step)


def wrong_digest(inspection: Inspection, expected: str) -> OverlayError | None:
    """Return the error for a whole overlay whose digest is not ``expected``; None without one.

    >>> wrong_digest(inspect(vllm, small), "0" * 64).code
    <Exit.DIGEST: 10>
    """
    if inspection.digest == expected:
        return None
    return OverlayError(
        Exit.DIGEST,
        f"the overlay is whole, but its digest is {inspection.digest}, not {expected}",
        subject=inspection.installation.site,
        expected=f"digest {expected}",
        found=f"digest {inspection.digest}",
        next_step="apply the version, --leave or --extra that give the expected digest (`doctor` "
        "prints the digest that a copy gives), or expect the other one",
    )


def wrong_variable(root: Path) -> str | None:
    """Return why the engine would refuse a variable of the overlay; None without a reason.

    ``root`` is a copy of the overlay, whose version is installed. An interpreter that cannot run
    the check is no reason: the engine reads the variables again.

    >>> wrong_variable(small.root) is None
    True
    """
    flags, folder = ("-B", "-I", "-S"), str(root / "vendor_overlay")
    try:
        found: str | None = answer(Path(sys.executable), _READ, *flags, request=folder)
    except NoAnswer:
        return None
    return found


def become(arguments: Sequence[str], interpreter: Path | None = None) -> NoReturn:
    """Exec ``arguments``: a command's name or its path, and its arguments.

    A name is looked up in the directory of ``interpreter``, the verified environment's, and then
    on PATH.

    Raises:
        OverlayError: the command cannot be started.
    """
    # Python ignores these signals, and an exec would inherit that.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    sys.stdout.flush()
    sys.stderr.flush()
    own = [str(interpreter.parent)] if interpreter else []
    command = arguments[0]
    try:
        if "/" not in command:
            # `execvp` would skip a script whose interpreter does not exist, and run the same
            # command of another environment.
            path = os.pathsep.join([*own, *os.get_exec_path()])
            if (found := shutil.which(command, path=path)) is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            command = found
        os.execv(command, [*arguments])  # noqa: S606
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        if isinstance(error, FileNotFoundError) and os.path.isfile(command):
            reason = "the interpreter in its first line does not exist"
        next_step = "name a command of that environment or on PATH, or its path"
        raise usage(f"cannot be started: {reason}", next_step, command) from None


def diff(inspection: Inspection) -> Iterator[str]:
    r"""Yield the overlay's changes as lines of unified diffs, with 12 lines around each change.

    Raises:
        OverlayError: a file is foreign.

    >>> next(diff(inspect(vllm, small)))
    '--- a/vllm/one.py\n'
    """
    refuse_foreign(inspection)
    for path in inspection.overlay.targets:
        old, new = _lines(inspection.pristine(path)), _lines(inspection.overlaid(path))
        yield from difflib.unified_diff(old, new, f"a/{path}", f"b/{path}", n=12)


def _lines(data: bytes) -> list[str]:
    text = data.decode(errors="surrogateescape")
    return [line + "\n" for line in text.removesuffix("\n").split("\n")] if text else []


@dataclass
class Diagnosis:
    """Findings of doctor.

    ``findings`` are pairs of a label and a line. ``inspection`` is None if the installation cannot
    be read. ``digest_after`` is None, and ``error`` set, if `apply` would be refused.
    """

    findings: list[tuple[str, str]]
    inspection: Inspection | None = None
    digest_after: str | None = None
    error: OverlayError | None = None


def diagnose(installation: Installation, overlay: Overlay, options: Options) -> Diagnosis:
    """Report on an installation, and on an ``apply`` with these options, a dry run.

    >>> diagnose(vllm, small, Options(force=True)).findings[0]
    ('vLLM', 'vllm 0.22.0 in /...')
    """
    python = installation.interpreter
    found = [("vLLM", f"{installation.title} in {installation.site}")]
    found.append(("Python", str(python) if python else "none found: name one with --python"))
    processes = list(serving(installation)) or ["no visible process"]
    found += [("serving", process) for process in processes]
    diagnosis = Diagnosis(found)
    try:
        diagnosis.inspection = recognise(installation, overlay)
        found.append(("state", diagnosis.inspection.described))
        outcome = apply(installation, overlay, options)
    except OverlayError as error:
        diagnosis.error, would = error, f" would be refused: {error.line}"
    else:
        diagnosis.digest_after = outcome.digest_after
        found.append(("digest", f"after apply: {outcome.digest_after}"))
        changed = len(outcome.changed)
        would = f"would change {changed} files" if changed else "has nothing to do"
        would = f"{outcome.inspection.overlay.selection} {would}"
    found.append(("apply", f"of overlay {overlay.pin.overlay}{would}"))
    return diagnosis
