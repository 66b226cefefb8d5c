"""Patches: unified diffs without context lines, applied exactly or not at all.

The base is pinned by checksum, so line numbers are exact. Removed lines and the positions of
both sides are checked, so a patch that applies can be reversed.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from overlay.errors import damaged
from overlay.files import read
from overlay.pin import is_safe

SERIES = "series"

#: At most six digits, below Python's limit for int conversions. The text behind ``@@`` may only be
#: a bare name, because a line of upstream's code would be a quotation.
_HUNK = re.compile(
    rb"@@ -(\d{1,6})(?:,(\d{1,6}))? \+(\d{1,6})(?:,(\d{1,6}))? @@(?: ([A-Za-z_]\w*))?",
)
_NO_NEWLINE = b"\\ No newline at end of file"


@dataclass(frozen=True)
class Hunk:
    """Lines to remove and lines to insert.

    ``old_at`` and ``new_at`` are zero-based line indices in the file before and after. Lines
    include their line feed; only a file's last line may lack it. ``place`` is the name of the
    enclosing function or class, for information.
    """

    old_at: int
    old: tuple[bytes, ...]
    new_at: int
    new: tuple[bytes, ...]
    place: str = field(default="", compare=False)

    def reversed(self) -> Hunk:
        """Return the inverse hunk."""
        return Hunk(self.new_at, self.new, self.old_at, self.old, self.place)


@dataclass(frozen=True)
class FilePatch:
    """Hunks of one patch in one file, in ascending order."""

    path: str
    hunks: tuple[Hunk, ...]

    def reversed(self) -> FilePatch:
        """Return the inverse change."""
        return FilePatch(self.path, tuple(hunk.reversed() for hunk in self.hunks))

    def apply(self, data: bytes, name: str) -> bytes:
        """Apply every hunk to ``data``.

        Raises:
            OverlayError: a removed line or a position differs from the patch.
        """
        lines = split_lines(data)
        result: list[bytes] = []
        end_of_last = 0
        for hunk in self.hunks:
            result += lines[end_of_last : hunk.old_at]
            end = hunk.old_at + len(hunk.old)
            if tuple(lines[hunk.old_at : end]) != hunk.old or not (
                end_of_last <= hunk.old_at <= len(lines)
            ):
                raise damaged(
                    f"{name} does not apply: line {hunk.old_at + 1} does not match",
                    self.path,
                )
            if len(result) != hunk.new_at:
                raise damaged(
                    f"{name} does not apply: the hunk for line {hunk.new_at + 1} of the result "
                    f"comes to line {len(result) + 1}",
                    self.path,
                )
            result += hunk.new
            end_of_last = end
        result += lines[end_of_last:]
        patched = b"".join(result)
        # Each line but the last ends with its only line feed.
        if patched.count(b"\n") + (patched[-1:] not in (b"", b"\n")) != len(result):
            raise damaged(f"{name} joins two lines: a line feed is missing", self.path)
        return patched


@dataclass(frozen=True)
class Patch:
    """Changes of one concern, after a DEP-3 header that ends at the first ``---`` line.

    DEP-3 is Debian's tagging convention: https://dep-team.pages.debian.net/deps/dep3/.
    """

    name: str
    header: str
    files: tuple[FilePatch, ...]

    @property
    def paths(self) -> set[str]:
        """Files that the patch changes."""
        return {file.path for file in self.files}


def header_fields(header: str) -> dict[str, str]:
    """Return the fields of a DEP-3 header; continuation lines are joined with line feeds."""
    fields: dict[str, str] = {}
    key = ""
    for line in header.splitlines():
        if line[:1].isspace() and key:
            fields[key] += "\n" + line.strip()
        elif ":" in line:
            key, _, value = line.partition(":")
            fields[key] = value.strip()
    return fields


def split_lines(data: bytes) -> list[bytes]:
    """Split ``data`` at line feeds only; lines keep their line feed."""
    return io.BytesIO(data).readlines()


def parse(name: str, data: bytes) -> Patch:
    """Parse one patch file.

    Raises:
        OverlayError: ``data`` is not a unified diff without context, or changes a file outside the
            vllm package.
    """
    lines = split_lines(data)
    at = next((i for i, line in enumerate(lines) if line.startswith(b"--- ")), len(lines))
    try:
        header = b"".join(lines[:at]).decode()
    except UnicodeDecodeError as error:
        raise damaged(f"the header is not UTF-8: {error}", name) from None
    files: list[FilePatch] = []
    while at < len(lines):
        path = _file_header(name, lines, at)
        at += 2
        hunks: list[Hunk] = []
        while at < len(lines) and lines[at].startswith(b"@@"):
            hunk, at = _hunk(name, lines, at)
            hunks.append(hunk)
        if not hunks:
            raise damaged(f"{path} has no hunk", f"{name}, line {at + 1}")
        files.append(FilePatch(path, tuple(hunks)))
    if not files:
        raise damaged("holds no change", name)
    if len({file.path for file in files}) != len(files):
        raise damaged("names one file twice", name)
    return Patch(name, header, tuple(files))


def _file_header(name: str, lines: Sequence[bytes], at: int) -> str:
    where = f"{name}, line {at + 1}"
    pair = [line.rstrip(b"\n").decode(errors="replace") for line in lines[at : at + 2]]
    if len(pair) < 2 or not pair[0].startswith("--- a/") or not pair[1].startswith("+++ b/"):
        raise damaged(f"expected '--- a/PATH' and '+++ b/PATH', found {pair!r}", where)
    old, new = pair[0][6:], pair[1][6:]
    if old != new:
        raise damaged(f"renames {old} to {new}; a patch may only change a file", where)
    if not is_safe(new):
        raise damaged(f"{new!r} is not a path inside the vllm package", where)
    return new


def _hunk(name: str, lines: Sequence[bytes], at: int) -> tuple[Hunk, int]:
    where = f"{name}, line {at + 1}"
    match = _HUNK.fullmatch(lines[at].rstrip(b"\n"))
    if not match:
        raise damaged("not a hunk header, or one that quotes upstream after the @@", where)
    old_start, old_count, new_start, new_count = (
        1 if group is None else int(group) for group in match.groups()[:4]
    )
    place = (match[5] or b"").decode()
    at += 1
    by_sign: dict[bytes, list[bytes]] = {b"-": [], b"+": []}
    for sign, count in ((b"-", old_count), (b"+", new_count)):
        while len(by_sign[sign]) < count:
            if at >= len(lines) or lines[at][:1] != sign:
                raise damaged(f"the hunk lacks lines with {sign.decode()}: it needs {count}", where)
            line = lines[at][1:]
            at += 1
            if at < len(lines) and lines[at].rstrip(b"\n") == _NO_NEWLINE:
                line = line[:-1]
                at += 1
            elif not line.endswith(b"\n"):
                raise damaged("the patch ends in the middle of a line", where)
            by_sign[sign].append(line)
    # An empty side has the number of the preceding line, any other side that of its first line.
    old_at = old_start if old_count == 0 else old_start - 1
    new_at = new_start if new_count == 0 else new_start - 1
    if (old_count == 0 and new_count == 0) or old_at < 0 or new_at < 0:
        raise damaged("an empty hunk, or one before the file's first line", where)
    return Hunk(old_at, tuple(by_sign[b"-"]), new_at, tuple(by_sign[b"+"]), place), at


def dumps(patch: Patch) -> bytes:
    """Format a patch file; :func:`parse` is the inverse."""
    parts = [patch.header.encode()]
    for file in patch.files:
        parts.append(f"--- a/{file.path}\n+++ b/{file.path}\n".encode())
        for hunk in file.hunks:
            old, new = _range(hunk.old_at, hunk.old), _range(hunk.new_at, hunk.new)
            parts.append(f"@@ -{old} +{new} @@ {hunk.place}".rstrip().encode() + b"\n")
            for sign, lines in ((b"-", hunk.old), (b"+", hunk.new)):
                for line in lines:
                    end = b"" if line.endswith(b"\n") else b"\n%s\n" % _NO_NEWLINE
                    parts.append(sign + line + end)
    return b"".join(parts)


def _range(at: int, lines: Sequence[bytes]) -> str:
    """Format one side of a hunk header; an empty side has the preceding line's number."""
    start = at + 1 if lines else at
    return f"{start}" if len(lines) == 1 else f"{start},{len(lines)}"


class Series:
    """Patches in the order of patches/series."""

    def __init__(self, patches: Iterable[Patch]) -> None:
        self.patches = tuple(patches)

    @classmethod
    def load(cls, directory: Path) -> Series:
        """Read ``directory/series`` and every listed patch.

        Raises:
            OverlayError: a listed patch is missing, malformed or listed twice.
        """
        try:
            names = names_in(read(directory / SERIES))
            return cls(parse(name, read(directory / _checked(name))) for name in names)
        except OSError as error:
            raise damaged(
                f"cannot be read ({error.strerror})", str(error.filename or directory)
            ) from None

    def paths(self) -> set[str]:
        """Return the files that the patches change."""
        return {path for patch in self.patches for path in patch.paths}

    def apply(self, path: str, data: bytes) -> bytes:
        """Apply all patches to upstream's bytes of ``path``; OverlayError if one does not apply."""
        for patch in self.patches:
            for file in patch.files:
                if file.path == path:
                    data = file.apply(data, patch.name)
        return data

    def reverse(self, path: str, data: bytes) -> bytes:
        """Reverse all patches on patched bytes of ``path``; OverlayError if one does not apply."""
        for patch in reversed(self.patches):
            for file in patch.files:
                if file.path == path:
                    data = file.reversed().apply(data, f"reversed {patch.name}")
        return data


def names_in(listing: bytes) -> list[str]:
    """Return the names in a ``series`` file; OverlayError for a duplicate."""
    lines = [line.strip() for line in listing.decode(errors="replace").splitlines()]
    names = [line for line in lines if line and line[0] != "#"]
    if len(set(names)) != len(names):
        raise damaged("lists a patch twice", SERIES)
    return names


def _checked(name: str) -> str:
    if "/" in name or name.startswith(".") or not name.isprintable():
        raise damaged(f"{name!r} is not the plain name of a patch", SERIES)
    return name


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
