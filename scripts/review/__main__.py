"""Review another release of vLLM against the overlay, in one page.

    python -m review release RELEASE    build/review/RELEASE: page, Markdown, JSON, candidate
    python -m review matrix RELEASES    build/review/matrix.html: several releases in one table
    python -m review rebase RELEASE     lay the series out on it in build/edit
    python -m review diff               the overlay against its own release, in the same form
    python -m review waiver [RELEASE]   each patch's reason, link and removal plan, as Markdown

Run it with ``PYTHONPATH=scripts``. RELEASE is a version, a wheel file, or ``latest``;
RELEASES is ``0.23.0..latest``, or versions with commas between them. Exit codes: 0 once it has
reported, those of ``overlay`` for a refusal; with ``--check`` also 10 if a release needs eyes and
11 for conflicts; of several releases the worst.
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until output.run: nothing is there to clean up

import argparse
import gc
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from overlay import cli, output
from overlay.errors import Exit, OverlayError
from overlay.output import escaped
from overlay.source import Overlay
from series import edit, upstream
from series.upstream import Upstream

from review import matrix, moves, released, review, trying, waiver, wheels
from review.fixes import MENDED
from review.vocabulary import Vocabulary
from review.words import Seams

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "review"


def main(argv: Sequence[str]) -> int:
    """Run one command.

    Returns:
        The exit code.
    """
    args = _parser().parse_args(argv)
    # Scratch directories are removed however the run ends.
    signal.signal(signal.SIGTERM, _end)
    try:
        code: int = args.run(args)
        return code
    except OverlayError as error:
        print(f"review: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("review: interrupted; an earlier review is unchanged", file=sys.stderr)
        return 130
    except OSError as error:
        refusal = OverlayError(
            Exit.DENIED,
            f"{error.strerror or error}; an earlier review is unchanged",
            subject=error.filename if isinstance(error.filename, str) else None,
            next_step="mend that, or name a directory that can be written to with --out",
        )
        print(f"review: {refusal}", file=sys.stderr)
        return refusal.code


def _end(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="review", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    for name, run, text in (
        ("release", _release, "review a release"),
        ("matrix", _matrix, "review several releases, in one table"),
        ("rebase", _rebase, "lay out the series on a release in build/edit"),
        ("diff", _diff, "show the overlay against its own release"),
        ("waiver", _waiver, "print the justification of each patch"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        if name == "matrix":
            command.add_argument("releases", help="versions with commas between, or FIRST..LAST")
        elif name != "diff":
            optional = "?" if name == "waiver" else None
            command.add_argument(
                "release", nargs=optional, help="a version, a wheel file, or latest"
            )
            command.add_argument("--sha256", help="of the wheel file, if no index knows it")
        if name in ("release", "matrix"):
            command.add_argument(
                "--check", action="store_true", help="end with 10 or 11 unless all is unchanged"
            )
        if name == "release":
            command.add_argument(
                "--try", dest="try_it", action="store_true", help="install, overlay and serve it"
            )
        if name != "rebase":
            command.add_argument(
                "--out", type=Path, default=FOLDER, help="the directory for reviews (build/review)"
            )
            command.add_argument("--json", action="store_true", help="print the JSON")
        base = command.add_argument_group("upstream's files of the pinned release")
        base.add_argument("--venv", help="from a virtual environment, pristine or overlaid,")
        base.add_argument("--site", help="a site-packages directory,")
        base.add_argument("--python", help="or the vLLM that an interpreter would import")
    return parser


def _release(args: argparse.Namespace) -> int:
    overlay = Overlay.load(ROOT)
    release = _obtain(args, overlay, args.out)
    trial = partial(trying.examine, ROOT) if args.try_it else None
    result = review.of_release(overlay, _base(args, overlay), release, args.out, trial=trial)
    _report(args, result)
    return _ending(args, review.CODES[result["verdict"]])


def _matrix(args: argparse.Namespace) -> int:
    overlay = Overlay.load(ROOT)
    versions = released.several(args.releases, overlay.pin)
    base = _base(args, overlay)
    # What takes longest is the same for every release.
    overlaid = _overlaid(overlay, base)
    uses = review.uses_of(overlay, base, overlaid)
    # Nothing of it is garbage before the end, and looking takes a fifth of the time.
    gc.freeze()

    def attempt(version: str) -> dict[str, Any]:
        release = wheels.obtain(version, None, args.out / "wheels", overlay.pin)
        return review.of_release(overlay, base, release, args.out, uses)

    columns: list[dict[str, Any]] = []
    progress = sys.stderr if args.json else sys.stdout
    try:
        for version in versions:
            entry = matrix.column(version, partial(attempt, version))
            columns.append(entry)
            state = entry["verdict"] or f"{entry['outcome']}: {entry['because']}"
            print(escaped(f"vLLM {entry['version']}: {state}"), file=progress, flush=True)
    except KeyboardInterrupt:
        done = ", ".join(each["version"] for each in columns if each["url"]) or "none"
        print(
            f"review: interrupted; reviewed until then: {done}; an earlier matrix is unchanged",
            file=sys.stderr,
        )
        return 130
    result = matrix.assemble(args.releases, overlay.pin, columns)
    matrix.write(result, args.out)
    if args.json:
        print(json.dumps(result))
    else:
        for sentence in result["summary"]:
            print(escaped(f"  {sentence}"))
        print(escaped(f"page: {args.out / matrix.PAGE}"))
    return _ending(args, matrix.code(result))


def _ending(args: argparse.Namespace, code: int) -> int:
    """Return the exit code; that of a verdict only if it was asked for."""
    return code if args.check or code not in review.CODES.values() else Exit.DONE


def _diff(args: argparse.Namespace) -> int:
    overlay = Overlay.load(ROOT)
    _report(args, review.of_itself(overlay, _base(args, overlay), args.out))
    return Exit.DONE


def _waiver(args: argparse.Namespace) -> int:
    overlay, result = Overlay.load(ROOT), None
    base = _base(args, overlay)
    if args.release:
        result = review.of_release(overlay, base, _obtain(args, overlay, args.out), args.out)
    vocabulary = Vocabulary(ROOT / "vendor_overlay")
    seams = Seams(overlay.series, base)
    text = waiver.markdown(overlay, vocabulary, seams, result)
    print(json.dumps({"markdown": text}) if args.json else text, end="\n" if args.json else "")
    return Exit.DONE


def _rebase(args: argparse.Namespace) -> int:
    overlay = Overlay.load(ROOT)
    release = _obtain(args, overlay, FOLDER)
    archives = {**release.archives, release.wheel: release.sha256}
    base = _base(args, overlay)
    moved = moves.examine(overlay, base, release.upstream)
    overlay, base, _ = moves.relocated(overlay, base, release.upstream, moved)
    conflicts = edit.rebase(overlay, base, release.upstream, release.version, archives)
    for warning in moves.warnings(moved):
        print(escaped(f"warning: {warning}"))
    print(escaped(f"build/edit is laid out on vLLM {release.version}"))
    if not conflicts:
        print("next: look at it, and `make refresh`")
        return review.CODES[review.CLEAN]
    for path in conflicts:
        print(escaped(f"  conflict  {path}"))
    print("next: in build/edit resolve it, `git add` it and `git rebase --continue` until git is")
    print("      done (`git rebase --skip` drops a patch), then `make refresh` here")
    return review.CODES[review.CONFLICT]


def _obtain(args: argparse.Namespace, overlay: Overlay, folder: Path) -> wheels.Release:
    if not args.release:
        raise OverlayError(
            Exit.USAGE,
            "RELEASE is empty",
            next_step="name a version or a wheel file: RELEASE=0.23.0, or RELEASE=latest",
        )
    wanted = released.one(args.release, overlay.pin)
    return wheels.obtain(wanted, args.sha256 or None, folder / "wheels", overlay.pin)


def _base(args: argparse.Namespace, overlay: Overlay) -> Upstream:
    return upstream.from_installation(cli.installation(args), overlay)


def _overlaid(overlay: Overlay, base: Upstream) -> dict[str, bytes]:
    """The patched files by path."""
    return {path: overlay.overlaid_bytes(path, base.read(path)) for path in overlay.targets}


def _report(args: argparse.Namespace, result: Mapping[str, Any]) -> None:
    if args.json:
        print(json.dumps(result))
        return
    version = result["release"]["version"]
    if not result["own"]:
        print(escaped(f"vLLM {version}: {result['verdict']}"))
        for sentence in result["summary"]:
            print(escaped(f"  {sentence}"))
        for patch in result["patches"]:
            line = f"{patch['verdict']:<9} {patch['name'][:4]} {patch['title']}: {patch['because']}"
            print(escaped(f"  {line}"))
        for step in result["tried"]:
            line = f"{step['outcome']:<9} {step['step']}: {step['detail']}"
            print(escaped(f"  {line}"))
        if gone := [fix["name"] for fix in result["fixes"] if fix["has"] == MENDED]:
            print(escaped(f"fixes that can go: {', '.join(gone)}"))
        for warning in result["warnings"]:
            print(escaped(f"warning: {warning}"))
        fates = [name["fate"] for name in result["names"]]
        counts = {fate: fates.count(fate) for fate in dict.fromkeys(fates)}
        print("names used: " + ", ".join(f"{n} {fate}" for fate, n in counts.items()))
    page = args.out / (review.OWN if result["own"] else version) / review.PAGE
    print(escaped(f"page: {page}"))
    kept = page.parent.with_name(f"{page.parent.name}{review.KEPT}")
    if kept.is_dir():
        print(escaped(f"the last other review with conflicts: {kept / review.PAGE}"))


if __name__ == "__main__":
    raise SystemExit(output.run("review", main))
