"""Patched files that have another place in a release, or none; and a release with our own place.

The series is reviewed and rebased where its files went. git's detection of renames says where.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from overlay.patches import Series, split_lines
from overlay.pin import PACKAGE
from overlay.source import Overlay
from series import git
from series.tree import write_file
from series.upstream import Upstream

from review.pieces import code, escape, row

MOVED, GONE, TAKEN = "moved", "gone", "taken"

#: A file that keeps less than this share of its lines may be what was left at the old place.
_HOLLOW = 0.2
_COLUMNS = ("file", "what became of it")


def examine(overlay: Overlay, base: Upstream, release: Upstream) -> list[dict[str, Any]]:
    """Look for each file that the patches change, and for a package of our package's name.

    Args:
        overlay: the overlay.
        base: the pinned release.
        release: the one under review.

    Returns:
        Findings: "path", "fate" (:data:`MOVED`, :data:`GONE` or :data:`TAKEN`) and "now", the new
        path or None.

    Raises:
        OverlayError: git is not there, or fails.
    """
    there = set(release.paths)
    lacking = [path for path in overlay.targets if path not in there]
    hollow = [path for path in overlay.targets if path in there and _is_hollow(base, release, path)]
    went = _renames(base, release, [*lacking, *hollow])
    for path in lacking:  # too unlike to be known again
        package = f"{path.removesuffix('.py')}/__init__.py"
        if path not in went and package in there and package not in base.paths:
            went[path] = package
    findings = [
        {"path": path, "fate": MOVED if path in went else GONE, "now": went.get(path)}
        for path in overlay.targets
        if path in went or path in lacking
    ]
    ours = [path for path in release.paths if path.startswith((f"{PACKAGE}/", f"{PACKAGE}.py"))]
    return findings + [{"path": path, "fate": TAKEN, "now": path} for path in ours[:1]]


def warnings(findings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A warning for each finding of :func:`examine`."""
    for each in findings:
        yield f"{each['path']}: {_sentence(each)}"


def section(
    findings: Sequence[Mapping[str, Any]],
) -> tuple[str, str, Sequence[str], list[str]]:
    """Heading, anchor, columns and rows, as :func:`review.sections.of_findings` yields them."""
    rows = [row(code(each["path"], True), escape(_sentence(each))) for each in findings]
    return "Files with another place", "moves", _COLUMNS, rows


def is_taken(findings: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the release has a module where ours are put, so that nothing can be laid over it."""
    return any(each["fate"] == TAKEN for each in findings)


def relocated(
    overlay: Overlay, base: Upstream, release: Upstream, findings: Sequence[Mapping[str, Any]]
) -> tuple[Overlay, Upstream, Upstream]:
    """The overlay and its release as if the files had always been where they are now.

    Args:
        overlay: the overlay.
        base: the pinned release.
        release: the one under review.
        findings: of :func:`examine`.

    Returns:
        Overlay, pinned release and release. A file that is gone is empty in the last. Old paths
        can still be read in both releases.
    """
    went = {each["path"]: each["now"] for each in findings if each["fate"] == MOVED}
    gone = {each["path"] for each in findings if each["fate"] == GONE}
    if not went and not gone:
        return overlay, base, release
    came = {now: path for path, now in went.items()}

    def before(path: str) -> bytes:
        return base.read(came.get(path, path))

    def after(path: str) -> bytes:
        return b"" if path in gone else release.read(went.get(path, path))

    series = Series(
        [
            replace(
                patch,
                files=tuple(replace(f, path=went.get(f.path, f.path)) for f in patch.files),
            )
            for patch in overlay.series.patches
        ]
    )
    upstream, result = (
        {went.get(path, path): digest for path, digest in table.items()}
        for table in (overlay.pin.upstream, overlay.pin.result)
    )
    paths = tuple(sorted(went.get(path, path) for path in base.paths))
    pin = replace(overlay.pin, upstream=upstream, result=result)
    return (
        replace(overlay, series=series, pin=pin),
        replace(base, paths=paths, read=before),
        replace(release, read=after),
    )


def original(
    overlaid: Mapping[str, bytes], findings: Sequence[Mapping[str, Any]]
) -> dict[str, bytes]:
    """Texts by new path, under the paths that they have in the pinned release."""
    came = {each["now"]: each["path"] for each in findings if each["fate"] == MOVED}
    return {came.get(path, path): text for path, text in overlaid.items()}


def _sentence(finding: Mapping[str, Any]) -> str:
    if finding["fate"] == MOVED:
        return f"it is {finding['now']} now, and is reviewed there"
    if finding["fate"] == GONE:
        return "it is gone, and nothing in the release is like it; find out what replaced it"
    return f"the release has a module where the overlay puts its own, {PACKAGE}; ours must move"


def _is_hollow(base: Upstream, release: Upstream, path: str) -> bool:
    lines = {line.strip() for line in split_lines(base.read(path))} - {b""}
    kept = {line.strip() for line in split_lines(release.read(path))}
    return len(lines & kept) < _HOLLOW * len(lines)


def _renames(base: Upstream, release: Upstream, paths: Sequence[str]) -> dict[str, str]:
    """Where git finds each of these files among those that the release has new."""
    if not paths:
        return {}
    new = sorted(set(release.paths) - set(base.paths))
    with tempfile.TemporaryDirectory(prefix="overlay-moves-") as scratch:
        folder = Path(scratch)
        for side, upstream, names in (("before", base, paths), ("after", release, new)):
            (folder / side).mkdir()
            for path in names:
                write_file(folder / side / path, upstream.read(path))
        options = ["--no-index", "--find-renames=50%", "-l0", "--name-status", "-z"]
        shown, _ = git.call(
            folder,
            ["diff", *options, "before", "after"],
            succeeded=lambda code: code in (0, 1),
            next_step="see what git says",
        )
    fields = iter(shown.decode(errors="surrogateescape").split("\0"))
    found = {}
    for status in fields:
        if status.startswith("R"):
            old, now = next(fields), next(fields)
            found[old.removeprefix("before/")] = now.removeprefix("after/")
        elif status:
            next(fields)
    return found
