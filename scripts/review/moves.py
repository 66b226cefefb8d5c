"""Patched files that have another place in a release, or none; and a release with our own place.

The series is reviewed and rebased where its files went. git's detection of renames says where.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from overlay.patches import Series, split_lines
from overlay.pin import PACKAGE
from overlay.source import Overlay
from series import git
from series.tree import write_file
from series.upstream import Upstream

MOVED, GONE, TAKEN = "moved", "gone", "taken"

#: A file that keeps less than this share of its lines may be what was left at the old place.
_HOLLOW = 0.2


@dataclass(frozen=True)
class Move:
    """A patched file that is not where it was, or a file in our package's place.

    Attributes:
        path: in the pinned release.
        fate: :data:`MOVED`, :data:`GONE` or :data:`TAKEN`.
        now: its path in the release, or None.
    """

    path: str
    fate: str
    now: str | None

    def __str__(self) -> str:
        """Return a sentence."""
        if self.fate == MOVED:
            return f"{self.path}: it is {self.now} now, and is reviewed there"
        if self.fate == GONE:
            return f"{self.path}: it is gone, and nothing in the release is like it"
        return f"{self.path}: the release has a module where the overlay puts its own, {PACKAGE}"


def examine(overlay: Overlay, base: Upstream, release: Upstream) -> list[Move]:
    """Look for each file that the patches change, and for a package of our package's name.

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
    ours = [path for path in release.paths if path.startswith((f"{PACKAGE}/", f"{PACKAGE}.py"))]
    return [
        *(
            Move(path, MOVED if path in went else GONE, went.get(path))
            for path in overlay.targets
            if path in went or path in lacking
        ),
        *(Move(path, TAKEN, path) for path in ours[:1]),
    ]


def went(moves: Sequence[Move]) -> dict[str, str]:
    """Return old path to new path of the files that moved."""
    return {each.path: each.now for each in moves if each.fate == MOVED and each.now}


def relocated(
    overlay: Overlay, base: Upstream, release: Upstream, moves: Sequence[Move]
) -> tuple[Overlay, Upstream, Upstream]:
    """Return overlay, pinned release and release as if the files had always been where they are.

    A file that is gone is empty in the release. Old paths can still be read in both releases.
    """
    new = went(moves)
    gone = {each.path for each in moves if each.fate == GONE}
    if not new and not gone:
        return overlay, base, release
    came = {now: path for path, now in new.items()}
    series = Series(
        [
            replace(
                patch, files=tuple(replace(f, path=new.get(f.path, f.path)) for f in patch.files)
            )
            for patch in overlay.series.patches
        ]
    )

    def renamed(table: Mapping[str, str]) -> dict[str, str]:
        return {new.get(path, path): digest for path, digest in table.items()}

    pin = replace(
        overlay.pin, upstream=renamed(overlay.pin.upstream), result=renamed(overlay.pin.result)
    )
    return (
        replace(overlay, series=series, pin=pin),
        replace(
            base,
            paths=tuple(sorted(new.get(path, path) for path in base.paths)),
            read=lambda path: base.read(came.get(path, path)),
        ),
        replace(
            release, read=lambda path: b"" if path in gone else release.read(new.get(path, path))
        ),
    )


def _is_hollow(base: Upstream, release: Upstream, path: str) -> bool:
    lines = {line.strip() for line in split_lines(base.read(path))} - {b""}
    kept = {line.strip() for line in split_lines(release.read(path))}
    return len(lines & kept) < _HOLLOW * len(lines)


def _renames(base: Upstream, release: Upstream, paths: Sequence[str]) -> dict[str, str]:
    """Return where git finds each of these files among the release's new ones."""
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
