"""The places of a diff's hunks in a file: exact, or none."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from overlay.patches import Hunk as Change
from overlay.patches import split_lines

from series.diffs import FileDiff, Hunk

#: git abbreviates ids to seven digits or more.
_SHORTEST_ID = 7


@dataclass(frozen=True)
class Applied:
    """A file with the hunks that have a place in it.

    Attributes:
        data: the file's bytes.
        left_out: the hunks without a place: each with its reason, a phrase.
    """

    data: bytes
    left_out: list[tuple[Hunk, str]]


def is_of(file: FileDiff, data: bytes) -> bool:
    """Whether git's ``index`` line says that a diff was made of these bytes."""
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    return len(file.old_id) >= _SHORTEST_ID and blob.startswith(file.old_id)


def apply(
    hunks: Iterable[Hunk], data: bytes, pristine: bytes, changes: Sequence[Change] | None
) -> Applied:
    """Apply each hunk that has an exact place.

    A hunk's lines, context included, have to stand once. The line numbers are believed only if
    the file that the diff was made of is known: other lines than those may be there by chance.

    Args:
        hunks: of one file, in ascending order.
        data: the file's bytes.
        pristine: upstream's bytes of it.
        changes: from the file that the diff was made of to ``data``, ascending; None if that
            file is not known.
    """
    lines, upstream = split_lines(data), split_lines(pristine)
    result: list[bytes] = []
    left_out: list[tuple[Hunk, str]] = []
    end = 0
    for hunk in hunks:
        place = _place(hunk, lines, upstream, changes)
        if isinstance(place, int):
            place = _conflict(hunk, place, lines, end) or place
        if isinstance(place, str):
            left_out.append((hunk, place))
            continue
        result += [*lines[end:place], *hunk.new]
        end = place + len(hunk.old)
    return Applied(b"".join([*result, *lines[end:]]), left_out)


def _place(
    hunk: Hunk, lines: list[bytes], upstream: list[bytes], changes: Sequence[Change] | None
) -> int | str:
    """The zero-based index that the hunk begins at, or why there is none."""
    if not hunk.old and hunk.old_at == 0:
        return 0  # The beginning is the beginning of any file.
    if changes is None:
        return _alone(hunk, lines, upstream)
    at = _moved(hunk, changes)
    if at is not None and at <= len(lines) and _stands(hunk.old, lines, at):
        return at
    return _absent(hunk, lines, changed=at is None)


def _alone(hunk: Hunk, lines: list[bytes], upstream: list[bytes]) -> int | str:
    """The place in a file of which nothing is known: the only one that has the hunk's lines."""
    if not hunk.old:
        return (
            "it has no context, which alone would tell its place; make the diff with some: "
            "git diff -U3"
        )
    found, before = (_find(hunk, hunk.old, each) for each in (lines, upstream))
    if not found:
        return _absent(hunk, lines, changed=bool(before))
    if len(found) == 1 >= len(before):
        return found[0]
    return (
        f"its lines stand at {max(len(found), len(before))} places; make the diff with more "
        "context: git diff -U10"
    )


def _absent(hunk: Hunk, lines: list[bytes], changed: bool) -> str:
    """Why a hunk's lines are not there; ``changed``: upstream's file has them."""
    if (hunk.leading or hunk.trailing) and _find(hunk, hunk.new, lines):
        return "is there already"
    if changed:
        return "a patch of the overlay, or one before it, has changed its lines"
    return "its lines are not those of the pinned release"


def _moved(hunk: Hunk, changes: Iterable[Change]) -> int | None:
    """The hunk's index behind the changes; None if one of them is at the same place."""
    start, stop = hunk.old_at, hunk.old_at + len(hunk.old)
    shift = 0
    for change in changes:
        first, last = change.old_at, change.old_at + len(change.old)
        beside = not hunk.old and first <= start <= last
        if beside or (first < stop and last > start):
            return None
        if last <= start:
            shift += len(change.new) - len(change.old)
    return start + shift


def _find(hunk: Hunk, block: Sequence[bytes], lines: list[bytes]) -> list[int]:
    """Where lines stand that a hunk has before or after. Of these, git anchors some at an end."""
    last = len(lines) - len(block)
    places: Iterable[int] = range(last + 1)
    if hunk.leading and not hunk.trailing:
        places = [last] if last >= 0 else []
    elif hunk.trailing and not hunk.leading and hunk.old_at == 0:
        places = [0]
    return [at for at in places if _stands(block, lines, at)] if block else []


def _stands(block: Sequence[bytes], lines: list[bytes], at: int) -> bool:
    return lines[at : at + len(block)] == list(block)


def _conflict(hunk: Hunk, at: int, lines: list[bytes], end: int) -> str | None:
    """Why a hunk cannot be applied at its place, if it cannot."""
    stop = at + len(hunk.old)
    if at < end:
        return "its lines stand before those of the hunk above it"
    unended = hunk.new and not hunk.new[-1].endswith(b"\n") and stop < len(lines)
    behind = hunk.new and at == len(lines) and lines and not lines[-1].endswith(b"\n")
    return "it would join two lines: a line end is missing" if unended or behind else None
