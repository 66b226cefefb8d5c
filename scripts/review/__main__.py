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

from review import review, trying, verdict, wheels
from review.merging import CONFLICTS

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
        overlay = Overlay.load(ROOT)
        kept = args.out / "wheels"
        release = wheels.obtain(args.release, args.sha256 or None, kept, overlay.pin)
        run = _review if args.command == "release" else _rebase
        base = upstream.from_installation(cli.installation(args), overlay)
        return run(args, overlay, base, release)
    except OverlayError as error:
        refusal = error
    except OSError as error:
        refusal = denied(error, "an earlier review is unchanged")
    print(f"review: {refusal}", file=sys.stderr)
    return refusal.code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="review", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    release = commands.add_parser("release", help="review a release")
    release.add_argument("--check", action="store_true", help="end with 10 or 11 for a change")
    release.add_argument("--no-try", action="store_true", help="do not install and serve it")
    rebase = commands.add_parser("rebase", help="lay out the series on a release in build/edit")
    for command in (release, rebase):
        command.add_argument("release", help="a version, a wheel file, or latest")
        command.add_argument("--sha256", help="of the wheel file, if no index knows it")
        command.add_argument("--out", type=Path, default=FOLDER, help="default: build/review")
        base = command.add_argument_group("upstream's files of the pinned release")
        base.add_argument("--venv", help="from a virtual environment, pristine or overlaid,")
        base.add_argument("--site", help="a site-packages directory,")
        base.add_argument("--python", help="or the vLLM that an interpreter would import")
    return parser


def _review(
    args: argparse.Namespace, overlay: Overlay, base: Upstream, release: wheels.Release
) -> int:
    trial = None if args.no_try else partial(trying.examine, ROOT)
    result = review.of_release(overlay, base, release, args.out, trial)
    lines = [f"vLLM {release.version}: {result.headline}"]
    lines += [f"  {CONFLICTS} {p.number} {p.title}: {p.because}" for p in result.conflicts]
    lines += [f"decide: {sentence}" for sentence in result.decisions]
    lines += [f"  {step.outcome:<9} {step.name}: {step.detail}" for step in result.tried]
    lines.append(f"report: {args.out / release.version / review.MARKDOWN}")
    print("\n".join(map(escaped, lines)))
    return verdict.CODES[result.verdict] if args.check else Exit.DONE


def _rebase(
    _: argparse.Namespace, overlay: Overlay, base: Upstream, release: wheels.Release
) -> int:
    conflicts = edit.rebase(overlay, base, release.upstream, release.version, release.archives)
    print(escaped(f"build/edit is laid out on vLLM {release.version}"))
    if not conflicts:
        print("next: look at it, and `make refresh`")
        return Exit.DONE
    for path in conflicts:
        print(escaped(f"  conflict  {path}"))
    print("next: in build/edit resolve it, `git add` it and `git rebase --continue` until git is")
    print("      done (`git rebase --skip` drops a patch), then `make refresh` here")
    return verdict.CODES[verdict.CONFLICT]


if __name__ == "__main__":
    raise SystemExit(output.run("review", main))
