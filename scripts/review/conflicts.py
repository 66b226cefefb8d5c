"""The place of a conflict in the release, the lines around it, what it looks like, and its text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from overlay.patches import split_lines

from review.drift import changed_lines
from review.outline import enclosing
from review.pieces import at, code, diff, escape, fenced

#: Lines of the release, and of the base, that are shown above and below a conflict.
_AROUND = 3
#: The share of its lines that makes a hunk look adopted.
_ADOPTED = 0.7
#: A line shorter than this may be anywhere by chance.
DISTINCTIVE = 8

#: Lines of each side of a conflict in the report.
_LONGEST = 30

#: White space, and commas and parentheses that a formatter puts in and takes out.
_LAYOUT = re.compile(rb"\s+|,(?=\s*[)\]}])|[()]")


@dataclass(frozen=True)
class Conflict:
    """Where a hunk conflicts.

    Attributes:
        at: the first line of the conflict in the release, one-based; of what the earlier patches
            put in, the line before it.
        function: the function or class around it there; empty at the top level.
        above: the lines before it there, with the earlier patches.
        below: the lines after it there, with them.
        base_above: the lines before it in the pinned release with the earlier patches.
        base_below: the lines after it there.
        hint: what it looks like, with the evidence; empty for most.
    """

    at: int
    function: str
    above: tuple[str, ...]
    below: tuple[str, ...]
    base_above: tuple[str, ...]
    base_below: tuple[str, ...]
    hint: str


def located(
    sides: tuple[bytes, bytes, bytes],
    places: tuple[int, int],
    lines: tuple[Sequence[bytes], Sequence[bytes], Sequence[bytes]],
) -> Conflict:
    """Describe a conflict.

    Args:
        sides: the texts of the base and of the release, each with the earlier patches, and that
            of the release.
        places: the zero-based line of the hunk in the base, and of the conflict in the release.
        lines: those of the conflict in the base, with the hunk, and in the release.

    Raises:
        OverlayError: git is not there, or fails.
    """
    (before, there, release), (hunk, at) = sides, places
    base, ours, theirs = lines
    old, new = split_lines(before), split_lines(there)
    starts = range(len(old) - len(base) + 1)
    same = [n for n in starts if list(old[n : n + len(base)]) == list(base)]
    start = min(same, key=lambda n: abs(n - hunk), default=hunk)
    added = [line for line in ours if line not in base]
    return Conflict(
        _line_before(release, there, at + 1),
        enclosing(there, at + 1),
        *_around(new, at, at + len(theirs)),
        *_around(old, start, start + len(base)),
        _hint(base, theirs, added, new),
    )


def shown(lines: Sequence[bytes]) -> tuple[str, ...]:
    """Lines as text, without their ends."""
    return tuple(line.decode(errors="replace").removesuffix("\n") for line in lines)


def report(review: Mapping[str, Any]) -> list[str]:
    """Each conflict with its text, as git writes it.

    Args:
        review: the contents of ``review.json``.
    """
    base, version = review["base"]["release"], review["release"]["version"]
    parts = []
    for patch in review["patches"]:
        for file in patch["files"]:
            for hunk in file["hunks"]:
                conflict = hunk["conflict"]
                if patch["verdict"] != "conflicts" or not conflict:
                    continue
                text = fenced(
                    [
                        *conflict["above"],
                        f"<<<<<<< {version}",
                        *_cut(hunk["theirs"]),
                        f"||||||| {base}",
                        *_cut(hunk["base"]),
                        "=======",
                        *_cut(hunk["ours"]),
                        f">>>>>>> {patch['name']}",
                        *conflict["below"],
                    ],
                    "python",
                )
                parts.append(f"{_place(review, patch, file, hunk)}\n\n{text}\n")
    return parts


def document(
    review: Mapping[str, Any],
    patch: Mapping[str, Any],
    file: Mapping[str, Any],
    hunk: Mapping[str, Any],
) -> list[str]:
    """The parts of the page that show a conflict: what we change, and what the release does."""
    base, version = review["base"]["release"], review["release"]["version"]
    conflict = hunk["conflict"]
    above, below = conflict["base_above"], conflict["base_below"]
    old = [*above, *hunk["base"], *below]
    ours = [*above, *hunk["ours"], *below]
    theirs = [*conflict["above"], *hunk["theirs"], *conflict["below"]]
    parts = [_place(review, patch, file, hunk)]
    if patch["verdict"] == "conflicts":
        name = patch["name"].removesuffix(".patch")
        path = f"candidate/conflicts/{name}/{file['path']}"
        parts.append(f"Git's merge of this patch, with its markers, is in {code(path)}.")
    return [
        *parts,
        diff((base, old), (f"{base}, overlaid", ours), numbered=False),
        diff((base, old), (version, theirs), numbered=False),
    ]


def _place(
    review: Mapping[str, Any],
    patch: Mapping[str, Any],
    file: Mapping[str, Any],
    hunk: Mapping[str, Any],
) -> str:
    version, conflict = review["release"]["version"], hunk["conflict"]
    inside = f", in {code(conflict['function'])}" if conflict["function"] else ""
    hint = f": {escape(conflict['hint'])}" if conflict["hint"] else ""
    where = at(version, f"{file['path']}:{conflict['at']}")
    number = escape(patch["name"].partition("-")[0])
    moved = f" What it changes is at line {hunk['now']} there." if hunk["now"] else ""
    return f"{number} conflicts with {escape(version)} at {where}{inside}{hint}.{moved}"


def _cut(lines: Sequence[str]) -> list[str]:
    if len(lines) <= _LONGEST:
        return list(lines)
    return [*lines[:_LONGEST], f"… {len(lines) - _LONGEST:,} more lines"]


def _around(
    lines: Sequence[bytes], first: int, end: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return shown(lines[max(first - _AROUND, 0) : first]), shown(lines[end : end + _AROUND])


def _line_before(release: bytes, there: bytes, line: int) -> int:
    """The line of the release that is a line of the text that the earlier patches make of it."""
    added = {number for changed in changed_lines(release, there) for number in changed}
    removed = {number for changed in changed_lines(there, release) for number in changed}
    # What neither side changes is the same on both, in the same order.
    kept = sum(number not in added for number in range(1, line + 1))
    there_too = (number for number in count(1) if number not in removed)
    return next(islice(there_too, max(kept - 1, 0), None))


def _hint(
    base: Sequence[bytes],
    theirs: Sequence[bytes],
    added: Sequence[bytes],
    release: Sequence[bytes],
) -> str:
    if theirs and _bare(base) == _bare(theirs):
        return (
            "likely only formatted: but for white space, parentheses and trailing commas, the "
            "release has the same text"
        )
    wanted = [line.strip() for line in added if len(line.strip()) >= DISTINCTIVE]
    there = {line.strip() for line in release}
    found = sum(line in there for line in wanted)
    if wanted and found >= _ADOPTED * len(wanted):
        return (
            f"likely adopted upstream: the release's file has {found} of the {len(wanted)} longer "
            "lines that the hunk adds"
        )
    return ""


def _bare(lines: Sequence[bytes]) -> bytes:
    """The text without layout, with one kind of quotes."""
    return _LAYOUT.sub(b"", b"".join(lines)).replace(b"'", b'"')
