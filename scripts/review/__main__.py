"""Review another release of vLLM against the overlay, in one report.

    python -m review release RELEASE    build/review/RELEASE: report, candidate
    python -m review rebase RELEASE     lay the series out on it in build/edit

Run it with ``PYTHONPATH=scripts``. RELEASE is a version, a wheel file, or ``latest``. Exit codes: 0
once it has reported, those of ``overlay`` for a refusal; with ``--check`` also 10 if anything has
changed and 11 for conflicts.
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until output.run: nothing is there to clean up

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from overlay import cli, output
from overlay.errors import Exit, OverlayError, denied
from overlay.output import escaped
from overlay.source import Overlay
from series import edit, upstream
from series.upstream import Upstream

from review import released, review, trying, wheels
from review.merging import CONFLICTS, OBSOLETE
from review.review import Review

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "review"


def main(argv: Sequence[str]) -> int:
    """Run one command.

    Returns:
        The exit code.
    """
    args = _parser().parse_args(argv)
    # Scratch directories are removed however the run ends.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        code: int = args.run(args)
        return code
    except OverlayError as error:
        print(f"review: {error}", file=sys.stderr)
        return error.code
    except OSError as error:
        refusal = denied(error, "an earlier review is unchanged")
        print(f"review: {refusal}", file=sys.stderr)
        return refusal.code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="review", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    for name, run, text in (
        ("release", _release, "review a release"),
        ("rebase", _rebase, "lay out the series on a release in build/edit"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        command.add_argument("release", help="a version, a wheel file, or latest")
        command.add_argument("--sha256", help="of the wheel file, if no index knows it")
        if name == "release":
            command.add_argument(
                "--check", action="store_true", help="end with 10 or 11 if anything has changed"
            )
            command.add_argument(
                "--no-try", action="store_true", help="do not install, overlay and serve it"
            )
            command.add_argument(
                "--out", type=Path, default=FOLDER, help="the directory for reviews (build/review)"
            )
        base = command.add_argument_group("upstream's files of the pinned release")
        base.add_argument("--venv", help="from a virtual environment, pristine or overlaid,")
        base.add_argument("--site", help="a site-packages directory,")
        base.add_argument("--python", help="or the vLLM that an interpreter would import")
    return parser


def _release(args: argparse.Namespace) -> int:
    overlay = Overlay.load(ROOT)
    release = _obtain(args, overlay, args.out)
    trial = None if args.no_try else partial(trying.examine, ROOT)
    result = review.of_release(overlay, _base(args, overlay), release, args.out, trial=trial)
    _print(result)
    print(escaped(f"report: {args.out / result.release.version / review.MARKDOWN}"))
    return review.CODES[result.verdict] if args.check else Exit.DONE


def _rebase(args: argparse.Namespace) -> int:
    overlay = Overlay.load(ROOT)
    release = _obtain(args, overlay, FOLDER)
    archives = {**release.archives, release.wheel: release.sha256}
    base = _base(args, overlay)
    conflicts = edit.rebase(overlay, base, release.upstream, release.version, archives)
    print(escaped(f"build/edit is laid out on vLLM {release.version}"))
    if not conflicts:
        print("next: look at it, and `make refresh`")
        return Exit.DONE
    for path in conflicts:
        print(escaped(f"  conflict  {path}"))
    print("next: in build/edit resolve it, `git add` it and `git rebase --continue` until git is")
    print("      done (`git rebase --skip` drops a patch), then `make refresh` here")
    return review.CODES[review.CONFLICT]


def _obtain(args: argparse.Namespace, overlay: Overlay, folder: Path) -> wheels.Release:
    wanted = released.one(args.release)
    return wheels.obtain(wanted, args.sha256 or None, folder / "wheels", overlay.pin)


def _base(args: argparse.Namespace, overlay: Overlay) -> Upstream:
    return upstream.from_installation(cli.installation(args), overlay)


def _print(result: Review) -> None:
    """Print the headline, the decisions, and the patches that do not merge."""
    print(escaped(f"vLLM {result.release.version}: {result.headline}"))
    for judged in result.merged.patches:
        if judged.verdict in (CONFLICTS, OBSOLETE):
            line = f"{judged.verdict:<9} {judged.number} {judged.title}: {judged.because}"
            print(escaped(f"  {line}"))
    for sentence in result.decisions:
        print(escaped(f"decide: {sentence}"))
    for step in result.tried:
        print(escaped(f"  {step.outcome:<9} {step.name}: {step.detail}"))


if __name__ == "__main__":
    raise SystemExit(output.run("review", main))
