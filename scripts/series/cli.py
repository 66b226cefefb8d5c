"""The command line of the author's loop: ``python -m series COMMAND``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from overlay import arguments, cli
from overlay.arguments import Once
from overlay.errors import Exit, usage
from overlay.output import escaped
from overlay.pin import sha256
from overlay.source import Overlay

from series import dist, edit, refresh, upstream
from series.check import load_unproven
from series.upstream import Upstream

#: The checkout that this tool is part of.
ROOT = Path(__file__).resolve().parents[2]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, by default from ``sys.argv``; return its :class:`~overlay.errors.Exit`."""
    parser, commands = arguments.program(
        "series", "Edit the series of patches, and build archives."
    )
    for name, run, text, reads_upstream in (
        ("vendor", _vendor, "build the vendored copies into vendor_overlay/", True),
        ("edit", _edit, "lay out the series as commits of a git tree in build/edit", True),
        ("refresh", _refresh, "write patches and checksums from build/edit", False),
        ("dist", _dist, "build the reproducible archive and wheel of HEAD in build/dist", True),
    ):
        sub = arguments.command(commands, name, run, text, target=reads_upstream)
        if reads_upstream:
            reads = "take upstream's files from this pinned wheel instead"
            sub.add_argument("--wheel", action=Once, help=reads)
        if name == "edit":
            sub.add_argument(
                "--patch", action=Once, metavar="NAME", help="begin a patch of this name"
            )
    return cli.run(parser, argv)


def _vendor(args: argparse.Namespace) -> int:
    overlay = Overlay.load(ROOT)
    return _report(args, dist.vendor(overlay, _upstream(args, overlay), args.dry_run))


def _edit(args: argparse.Namespace) -> int:
    overlay = load_unproven(ROOT)
    files = edit.edit(overlay, _upstream(args, overlay), args.dry_run, args.patch)
    code = _report(args, files)
    if args.patch is not None and not args.json and not args.dry_run:
        print("next: change files there; `git commit --all` there begins with the patch's header;")
        print("      then `make refresh` here")
    return code


def _refresh(args: argparse.Namespace) -> int:
    return _report(args, refresh.refresh(ROOT, args.dry_run))


def _dist(args: argparse.Namespace) -> int:
    built = dist.dist(ROOT, lambda head: _upstream(args, head), args.dry_run)
    sums = {path: sha256(data) for path, data in built.files.items()}
    facts = {"sha256": sums, "digest_after": built.digest_after}
    code = _report(args, list(built.files), facts)
    if not args.json:
        for path, checksum in sums.items():
            print(f"{checksum}  {path}")
        print(f"digest after apply: {built.digest_after}")
    return code


def _upstream(args: argparse.Namespace, overlay: Overlay) -> Upstream:
    if args.wheel == "":
        raise usage("WHEEL is empty", "name a wheel, or leave WHEEL (--wheel) out")
    if args.wheel:
        return upstream.from_wheel(Path(args.wheel), overlay)
    return upstream.from_installation(cli.installation(args), overlay)


def _report(
    args: argparse.Namespace, files: Sequence[str], facts: Mapping[str, object] | None = None
) -> int:
    if args.json:
        report = {"command": args.command, "dry_run": args.dry_run, "files": list(files)}
        print(json.dumps({**report, **(facts or {})}))
        return Exit.DONE
    for file in files:
        print(escaped(f"{'would write' if args.dry_run else 'wrote'} {file}"))
    if not files:
        print("nothing to do: everything is as it should be")
    return Exit.DONE
