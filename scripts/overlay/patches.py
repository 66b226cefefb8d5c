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
    rb"@@ -(\d{1,6})(?:,(\d{1,6}))? \+(\d{1,6})(?:,(\d{1,6}))? @@(?: ([A-Za-z_]\w*))?\n"
)
_FILE = re.compile(rb"--- a/(.+)\n\+\+\+ b/\1\n")
_EXPECTED = (
    "expected '--- a/PATH' and '+++ b/PATH', or a hunk's header that quotes nothing behind the @@"
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
                    f"{name} does not apply: line {hunk.old_at + 1} does not match", self.path
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
    r"""Return the fields of a DEP-3 header; continuation lines are joined with line feeds.

    >>> header_fields("Origin: one\n two\nBug: none\n")
    {'Origin': 'one\ntwo', 'Bug': 'none'}
    """
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
    r"""Split ``data`` at line feeds only; lines keep their line feed.

    >>> split_lines(b"one\ntwo")
    [b'one\n', b'two']
    """
    return io.BytesIO(data).readlines()


def parse(name: str, data: bytes) -> Patch:
    r"""Parse one patch file; :func:`dumps` is the inverse.

    Raises:
        OverlayError: ``data`` is not a unified diff without context, in the form that :func:`dumps`
            writes, or changes a file outside the vllm package.

    >>> patch = parse("a.patch", b"--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1 +0,0 @@\n-A = 1\n")
    >>> patch.files[0].apply(b"A = 1\nB = 2\n", patch.name)
    b'B = 2\n'
    """
    lines = split_lines(data)
    at = next((i for i, line in enumerate(lines) if line.startswith(b"--- ")), len(lines))
    try:
        header = b"".join(lines[:at]).decode()
    except UnicodeDecodeError as error:
        raise damaged(f"the header is not UTF-8: {error}", name) from None
    changes: dict[str, list[Hunk]] = {}
    path = ""
    while at < len(lines):
        where = f"{name}, line {at + 1}"
        if names := _FILE.fullmatch(b"".join(lines[at : at + 2])):
            path = names[1].decode(errors="replace")
            if path in changes or not is_safe(path):
                reason = "is named twice" if path in changes else "is not inside the vllm package"
                raise damaged(f"{path!r} {reason}", where)
            changes[path] = []
            at += 2
        elif path and (match := _HUNK.fullmatch(lines[at])):
            hunk, at = _hunk(match, lines, at + 1)
            if not (hunk.old or hunk.new) or hunk.old_at < 0 or hunk.new_at < 0:
                raise damaged("an empty hunk, or one before the file's first line", where)
            changes[path].append(hunk)
        else:
            raise damaged(f"{_EXPECTED}, found {lines[at]!r}", where)
    if not changes or not all(changes.values()):
        raise damaged(f"{path} has no hunk" if path else "holds no change", name)
    patch = Patch(name, header, tuple(FilePatch(p, tuple(each)) for p, each in changes.items()))
    written = split_lines(dumps(patch))
    if written != lines:
        pairs = enumerate(zip(lines, written, strict=False))
        at = next((i for i, (line, other) in pairs if line != other), len(lines) - 1)
        raise damaged("not a line of a diff without context", f"{name}, line {at + 1}")
    return patch


def _hunk(header: re.Match[bytes], lines: Sequence[bytes], at: int) -> tuple[Hunk, int]:
    """Return the hunk whose first line is ``lines[at]``, and the index of the line behind it."""
    sides: list[tuple[int, tuple[bytes, ...]]] = []
    for start, count in (header.group(1, 2), header.group(3, 4)):
        side = [line[1:] for line in lines[at : at + int(count or b"1")]]
        at += len(side)
        if side and at < len(lines) and lines[at].rstrip(b"\n") == _NO_NEWLINE:
            side[-1] = side[-1].removesuffix(b"\n")
            at += 1
        # An empty side has the number of the preceding line, any other side that of its first line.
        sides.append((int(start) - bool(side), tuple(side)))
    return Hunk(*sides[0], *sides[1], (header[5] or b"").decode()), at


def dumps(patch: Patch) -> bytes:
    r"""Format a patch file.

    >>> dumps(Patch("a", "Bug: none\n", (FilePatch("vllm/a.py", (Hunk(0, (), 0, (b"x\n",)),)),)))
    b'Bug: none\n--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -0,0 +1 @@\n+x\n'
    """
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
            listing = read(directory / SERIES).decode(errors="replace")
            lines = [line.strip() for line in listing.splitlines()]
            names = [line for line in lines if line and line[0] != "#"]
            for name in names:
                if "/" in name or " " in name or name[0] == "." or not is_safe(f"vllm/{name}"):
                    raise damaged(f"{name!r} is not the plain name of a patch", SERIES)
            if len(set(names)) != len(names):
                raise damaged("lists a patch twice", SERIES)
            return cls(parse(name, read(directory / name)) for name in names)
        except OSError as error:
            raise damaged(
                f"cannot be read ({error.strerror})", str(error.filename or directory)
            ) from None

    def paths(self) -> set[str]:
        """Return the files that the patches change."""
        return {path for patch in self.patches for path in patch.paths}

    def changes(self, path: str) -> list[tuple[str, FilePatch]]:
        """Return the changes of one file, in order, each with its patch's name."""
        return [(patch.name, f) for patch in self.patches for f in patch.files if f.path == path]

    def apply(self, path: str, data: bytes) -> bytes:
        """Apply all patches to upstream's bytes of ``path``; OverlayError if one does not apply."""
        for name, file in self.changes(path):
            data = file.apply(data, name)
        return data

    def reverse(self, path: str, data: bytes) -> bytes:
        """Reverse all patches on patched bytes of ``path``; OverlayError if one does not apply."""
        for name, file in reversed(self.changes(path)):
            data = file.reversed().apply(data, f"reversed {name}")
        return data
