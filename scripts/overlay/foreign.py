"""Describe a foreign file: its patcher, and its differences.

Upstream's file is not available for comparison; only the lines in our patches are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from overlay import record
from overlay.files import read
from overlay.patches import Hunk, Series, split_lines
from overlay.source import MARK
from overlay.state import FileState, Inspection

#: A comment in which a patcher names itself. The upstream files that we patch have none.
_MARK = re.compile(
    rb"^\s*#.*\b((patched|modified|changed|edited|ported)\s+by|back-?ported|patched\s+for)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Place:
    """Place of one of our hunks in a foreign file.

    ``shift`` is the offset in lines from upstream's position, or None if no place was found.
    """

    hunk: Hunk
    shift: int | None


def describe(inspection: Inspection, file: FileState) -> list[str]:
    """Describe a foreign file: its patcher, its changes, and whether our hunks would merge.

    Returns sentences; none for an absent file, or for a file that the overlay does not change.
    """
    overlay = inspection.overlay
    if file.data is None or file.path not in overlay.pin.upstream:
        return []
    hunks = composed(overlay.series, file.path)
    before = _places(hunks, file.data)
    after = _places([hunk.reversed() for hunk in hunks], file.data)
    laid = _recognised(after) > _recognised(before)
    return [
        *_marks(file.data),
        *_package(inspection, file, file.data),
        *(_kept(after) if laid else _merge(before)),
    ]


def _recognised(placed: Sequence[Place]) -> int:
    """Return the number of placed hunks that replace lines, without pure insertions."""
    return sum(bool(place.hunk.old) and place.shift is not None for place in placed)


def _marks(data: bytes) -> Iterator[str]:
    for number, line in enumerate(split_lines(data), 1):
        if _MARK.search(line) and MARK not in line:
            yield f"line {number} says: {line.decode(errors='replace').strip()[:100]}"


def _package(inspection: Inspection, file: FileState, data: bytes) -> Iterator[str]:
    """Yield the packages that list the file; without any, its time of modification."""
    installation = inspection.installation
    start, now = f"{file.path},".encode(), record.row(file.path, data)
    listed = False
    for path in sorted(installation.site.glob("*.dist-info/RECORD")):
        try:
            rows = [line.rstrip(b"\r\n") for line in split_lines(read(path))]
        except OSError:
            continue
        if now in rows:
            yield f"{path.parent.name} installed it: its RECORD lists these bytes"
            listed = True
        elif path != installation.record and any(row.startswith(start) for row in rows):
            yield f"{path.parent.name} also lists it, with other bytes"
    if not listed:
        changed = _time(installation.site / file.path)
        yield f"no package's RECORD lists these bytes; last modified on {changed}"


def _time(path: Path) -> str:
    time = datetime.fromtimestamp(path.stat().st_mtime, timezone.utc)
    return time.strftime("%Y-%m-%d %H:%M UTC")


def _merge(placed: Sequence[Place]) -> Iterator[str]:
    """Yield known differences from upstream's file, and whether our hunks would merge."""
    unplaced = [place.hunk for place in placed if place.shift is None]
    yield from _differences(placed, "upstream's lines", "which the overlay replaces")
    if not unplaced:
        yield f"the overlay's {len(placed)} hunks would merge"
    for verdict, hunks in (
        ("would not merge", [hunk for hunk in unplaced if hunk.old]),
        ("unknown without upstream's file", [hunk for hunk in unplaced if not hunk.old]),
    ):
        if hunks:
            lines = ", ".join(str(hunk.old_at + 1) for hunk in hunks[:5])
            more = f" and {len(hunks) - 5} more" if len(hunks) > 5 else ""
            where = f"at upstream's lines {lines}{more}"
            yield f"{verdict}: {len(hunks)} of {len(placed)} hunks, {where}"


def _kept(placed: Sequence[Place]) -> Iterator[str]:
    """Yield known differences from the overlaid file, and whether all our changes are present."""
    yield from _differences(placed, "the overlaid file's lines", "which are the overlay's")
    ours = [place for place in placed if place.hunk.old]
    lost = sum(place.shift is None for place in ours)
    if not lost:
        yield f"all {len(ours)} changes of the overlay are present, with others added"


def _differences(placed: Sequence[Place], lines_of: str, whose: str) -> Iterator[str]:
    last, shift = 0, 0
    for place in placed:
        hunk = place.hunk
        if place.shift is None:
            if hunk.old:
                lines = f"{hunk.old_at + 1}-{hunk.old_at + len(hunk.old)}"
                yield f"{lines_of} {lines}, {whose}, have changed"
            continue
        if place.shift != shift:
            count = place.shift - shift
            words = f"{abs(count)} line{'s' * (abs(count) > 1)} {'more' if count > 0 else 'fewer'}"
            yield f"{words} between {lines_of} {last + 1} and {hunk.old_at + 1}"
            shift = place.shift
        last = hunk.old_at + len(hunk.old)


def places(series: Series, path: str, data: bytes) -> list[Place]:
    """Find the place of each of our hunks in a foreign file.

    The hunks have no context. A hunk that replaces lines is found by those lines, at the shift of
    the previous hunk, or else at their only occurrence. A pure insertion is found if the nearest
    such hunks before and after it have the same shift; lines in between may differ.
    """
    return _places(composed(series, path), data)


def _places(hunks: Sequence[Hunk], data: bytes) -> list[Place]:
    lines = split_lines(data)
    anchors: list[int | None] = []
    shift, end = 0, 0
    for index, hunk in enumerate(hunks):
        following = next((later for later in hunks[index + 1 :] if later.old), None)
        at = _find(lines, hunk, shift, end, following) if hunk.old else None
        if at is not None:
            shift, end = at - hunk.old_at, at + len(hunk.old)
        anchors.append(None if at is None else shift)
    return [
        Place(hunk, _between(anchors, index) if not hunk.old else anchors[index])
        for index, hunk in enumerate(hunks)
    ]


def _find(
    lines: Sequence[bytes], hunk: Hunk, shift: int, start: int, following: Hunk | None
) -> int | None:
    def holds(candidate: Hunk, at: int) -> bool:
        return tuple(lines[at : at + len(candidate.old)]) == candidate.old

    if hunk.old_at + shift >= start and holds(hunk, hunk.old_at + shift):
        return hunk.old_at + shift
    # At another shift, lines such as `else:` prove nothing. Lines that occur once do, if the next
    # hunk's lines have the same shift.
    elsewhere = [at for at in range(start, len(lines)) if holds(hunk, at)]
    if len(elsewhere) != 1:
        return None
    moved = elsewhere[0] - hunk.old_at
    if following is not None and not holds(following, following.old_at + moved):
        return None
    return elsewhere[0]


def _between(anchors: Sequence[int | None], index: int) -> int | None:
    """Return the shift of the nearest anchors before and after, or None if they differ.

    The start of the file is an anchor with shift 0. The last anchor's shift applies after it.
    """
    before = next((a for a in reversed(anchors[:index]) if a is not None), 0)
    after = next((a for a in anchors[index + 1 :] if a is not None), before)
    return before if before == after else None


def composed(series: Series, path: str) -> list[Hunk]:
    """Combine the changes of all patches to one file into hunks against upstream's file.

    Upstream's bytes are not needed: its lines are represented by their numbers.
    """
    files = [file for patch in series.patches for file in patch.files if file.path == path]
    every = [hunk for file in files for hunk in file.hunks]
    # An upper bound: each removed line lowers the numbers that later patches see.
    reach = max((hunk.old_at for hunk in every), default=0) + sum(len(h.old) + 1 for h in every)
    known: dict[int, bytes] = {}
    lines: list[int | bytes] = list(range(reach))
    for file in files:
        for hunk in reversed(file.hunks):
            end = hunk.old_at + len(hunk.old)
            for line, text in zip(lines[hunk.old_at : end], hunk.old, strict=True):
                if isinstance(line, int):
                    known[line] = text
            lines[hunk.old_at : end] = hunk.new
    hunks: list[Hunk] = []
    new: list[bytes] = []
    expected = new_at = 0
    for line in lines:
        if isinstance(line, bytes):
            new.append(line)
            continue
        if new or line != expected:
            old = tuple(known[at] for at in range(expected, line))
            hunks.append(Hunk(expected, old, new_at, tuple(new)))
            new_at += len(new)
        new, expected, new_at = [], line + 1, new_at + 1
    return hunks
