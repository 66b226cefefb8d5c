"""What another release of vLLM means for the overlay, in one page.

    python scripts/review release RELEASE    build/review/RELEASE: page, Markdown, JSON, candidate
    python scripts/review rebase RELEASE     the series on it, in build/edit, for the author's loop
    python scripts/review diff               the overlay against its own release, in the same form

RELEASE is a version, or a wheel file. Exit codes: 0 clean, 10 needs eyes, 11 conflicts; those of
scripts/overlay for a refusal.
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until output.run: nothing is there to clean up

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
if not __package__:
    # Run as a directory: put its parent on the path so that it is a package.
    sys.path[0] = str(ROOT / "scripts")

from overlay import cli, output  # noqa: E402
from overlay.errors import Exit, OverlayError  # noqa: E402
from overlay.output import escaped  # noqa: E402
from overlay.source import Overlay  # noqa: E402
from series import edit, upstream  # noqa: E402
from series.upstream import Upstream  # noqa: E402

from review import review, wheels  # noqa: E402

FOLDER = Path("build", "review")


def main(argv: Sequence[str]) -> int:
    """Run one command; its exit code."""
    args = _parser().parse_args(argv)
    # Scratch directories are taken away, whoever ends the run.
    signal.signal(signal.SIGTERM, _end)
    try:
        run = {"release": _release, "rebase": _rebase, "diff": _diff}[args.command]
        return run(args)
    except OverlayError as error:
        print(f"review: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("review: interrupted; what was there before is there still", file=sys.stderr)
        return 130
    except OSError as error:
        failed = OverlayError(
            Exit.DENIED,
            f"{error.strerror or error}; what was there before is there still",
            subject=error.filename if isinstance(error.filename, str) else None,
            next_step="mend that, or name a directory that can be written to with --out",
        )
        print(f"review: {failed}", file=sys.stderr)
        return failed.code


def _end(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="review", description=(__doc__ or "").partition("\n")[0])
    every = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    for name, text in (
        ("release", "review a release"),
        ("rebase", "lay out the series on a release in build/edit"),
        ("diff", "show the overlay against its own release"),
    ):
        sub = every.add_parser(name, help=text, description=text)
        if name != "diff":
            sub.add_argument("release", help="a version, or a wheel file")
            sub.add_argument("--sha256", help="of the wheel file, if no index knows it")
        if name != "rebase":
            sub.add_argument("--out", type=Path, help="the directory for reviews (build/review)")
            sub.add_argument("--json", action="store_true", help="print the JSON")
        base = sub.add_argument_group("upstream's files of the pinned release")
        base.add_argument("--venv", help="from a virtual environment, pristine or overlaid,")
        base.add_argument("--site", help="a site-packages directory,")
        base.add_argument("--python", help="or what an interpreter would import")
    return parser


def _release(args: argparse.Namespace) -> int:
    overlay = Overlay.load(ROOT)
    folder = args.out or ROOT / FOLDER
    wanted = _wanted(args, overlay, folder)
    found = review.of_release(overlay, _base(args, overlay), wanted, folder)
    _say(args, found, folder)
    return review.CODES[found["verdict"]]


def _diff(args: argparse.Namespace) -> int:
    overlay = Overlay.load(ROOT)
    folder = args.out or ROOT / FOLDER
    _say(args, review.of_itself(overlay, _base(args, overlay), folder), folder)
    return Exit.DONE


def _rebase(args: argparse.Namespace) -> int:
    overlay = Overlay.load(ROOT)
    wanted = _wanted(args, overlay, ROOT / FOLDER)
    conflicts = edit.rebase(
        overlay,
        _base(args, overlay),
        wanted.upstream,
        wanted.version,
        {wanted.wheel: wanted.sha256},
    )
    print(escaped(f"build/edit is laid out on vLLM {wanted.version}"))
    if not conflicts:
        print("next: look at it, and `make refresh`")
        return review.CODES[review.CLEAN]
    for path in conflicts:
        print(escaped(f"  conflict  {path}"))
    print("next: in build/edit settle it, `git add` it and `git rebase --continue` until git is")
    print("      done (`git rebase --skip` drops a patch), then `make refresh` here")
    return review.CODES[review.CONFLICT]


def _wanted(args: argparse.Namespace, overlay: Overlay, folder: Path) -> wheels.Release:
    if not args.release:
        raise OverlayError(
            Exit.USAGE,
            "RELEASE is empty",
            next_step="name a version or a wheel file: RELEASE=0.23.0",
        )
    return wheels.obtain(args.release, args.sha256 or None, folder / "wheels", overlay.pin)


def _base(args: argparse.Namespace, overlay: Overlay) -> Upstream:
    return upstream.from_installation(cli.installation(args), overlay)


def _say(args: argparse.Namespace, found: Mapping[str, Any], folder: Path) -> None:
    if args.json:
        print(json.dumps(found))
        return
    version = found["release"]["version"]
    if not found["own"]:
        print(escaped(f"vLLM {version}: {found['verdict']}"))
        for patch in found["patches"]:
            line = f"{patch['verdict']:<9} {patch['name'][:4]} {patch['title']}: {patch['because']}"
            print(escaped(f"  {line}"))
        for warning in found["warnings"]:
            print(escaped(f"warning: {warning}"))
        fates = [name["fate"] for name in found["names"]]
        counted = {fate: fates.count(fate) for fate in dict.fromkeys(fates)}
        print("names relied on: " + ", ".join(f"{n} {fate}" for fate, n in counted.items()))
    page = folder / (review.OWN if found["own"] else version) / review.PAGE
    print(escaped(f"page: {page}"))


if __name__ == "__main__":
    raise SystemExit(output.run("review", main))
