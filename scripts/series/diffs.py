"""Read diffs that other tools made: git's, with context lines, alone or as mails."""

from __future__ import annotations

import email
import email.errors
import email.header
import re
from dataclasses import dataclass, field

from overlay.errors import usage
from overlay.patches import split_lines

_HUNK = re.compile(rb"@@ -(\d{1,9})(?:,(\d{1,9}))? \+\d{1,9}(?:,(\d{1,9}))? @@")
_INDEX = re.compile(rb"index ([0-9a-f]+)\.\.[0-9a-f]+\b")
#: The line that begins each commit in what `git format-patch` writes.
_MAIL = re.compile(rb"^From [0-9a-f]{7,64} .*\n", re.MULTILINE)
_NOWHERE = "/dev/null"


@dataclass(frozen=True)
class Hunk:
    """A hunk as it stands in the diff.

    Attributes:
        line: the one-based line of the old file that it begins at, or follows.
        old: its lines in the old file, context included; only a file's last one may lack its
            line feed.
        new: the same in the new file.
        leading: how many lines of context it begins with.
        trailing: how many it ends with.
    """

    line: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]
    leading: int
    trailing: int

    @property
    def old_at(self) -> int:
        """The zero-based index in the old file; a hunk without lines there follows its line."""
        return self.line - 1 if self.old else self.line


@dataclass
class FileDiff:
    """What one commit does to one file.

    Attributes:
        old: the path before; ``/dev/null`` for a new file.
        new: the path afterwards; ``/dev/null`` for a file that is deleted.
        header: git's lines between the paths and the hunks.
        hunks: in the diff's order.
    """

    old: str = ""
    new: str = ""
    header: list[bytes] = field(default_factory=list)
    hunks: list[Hunk] = field(default_factory=list)

    @property
    def path(self) -> str:
        """The path of the file, as far as there is one."""
        return self.old if self.new in ("", _NOWHERE) else self.new

    @property
    def old_id(self) -> str:
        """The id that git gives the old file's bytes, abbreviated; empty if the diff has none."""
        ids = [match[1].decode() for line in self.header if (match := _INDEX.match(line))]
        return ids[0] if ids else ""

    @property
    def obstacle(self) -> str | None:
        """Why it is no change to the lines of a file; None if it is one."""
        for applies, reason in (
            (self._has(b"rename ", b"copy "), "renames or copies a file"),
            (self.old == _NOWHERE or self._has(b"new file "), "adds a file"),
            (self.new == _NOWHERE or self._has(b"deleted file "), "deletes a file"),
            (self._has(b"GIT binary ", b"Binary files "), "changes a binary file"),
            (self._has(b"@@@"), "is the diff of a merge, which has two files before it"),
        ):
            if applies:
                return reason
        if self.old != self.new:
            return f"renames {self.old}"
        return None if self.hunks else "changes no line"

    @property
    def changes_mode(self) -> bool:
        """Whether the file's permissions change."""
        return self._has(b"old mode ")

    def _has(self, *beginnings: bytes) -> bool:
        return any(line.startswith(beginnings) for line in self.header)


@dataclass(frozen=True)
class Diff:
    """A diff.

    Attributes:
        files: in the diff's order; a file occurs once for each commit that changes it.
        mails: subject, author and text of each commit that has a mail's header.
    """

    files: list[FileDiff]
    mails: list[tuple[str, str, str]]


def read(data: bytes, name: str) -> Diff:
    """Read a diff, whose line ends are LF.

    Raises:
        OverlayError: there is no diff in it, or it ends in the middle of a hunk.
    """
    files: list[FileDiff] = []
    mails: list[tuple[str, str, str]] = []
    text = b""  # what was read since the last file
    lines = split_lines(data if data.endswith(b"\n") else data + b"\n")
    at = 0
    current: FileDiff | None = None
    while at < len(lines):
        line = lines[at]
        following = lines[at + 1] if at + 1 < len(lines) else b""
        begins = line.startswith(b"--- ") and following.startswith(b"+++ ")
        if line.startswith(b"diff --git ") or (begins and (current is None or current.hunks)):
            mails += _mail(text)
            text = b""
            current = FileDiff(*_paths(line))
            files.append(current)
        if begins and current is not None:
            current.old, current.new = _path(line[4:]), _path(following[4:])
            at += 2
        elif current is not None and (match := _HUNK.match(line)):
            hunk, at = _hunk(lines, at, match, name)
            current.hunks.append(hunk)
        elif current is not None and line.startswith(b"@@ "):
            raise usage(
                f"has a hunk header that cannot be read, at line {at + 1}",
                "get the diff again",
                subject=name,
            )
        else:
            if _MAIL.fullmatch(line) or line == b"-- \n":
                current = None
            if current is None:
                text += line
            elif not line.startswith(b"diff --git "):
                current.header.append(line)
            at += 1
    if not files:
        raise usage(
            "holds no diff",
            "name a file that `git diff` or a pull request's .diff or .patch gave",
            subject=name,
        )
    return Diff(files, mails)


def _hunk(lines: list[bytes], at: int, match: re.Match[bytes], name: str) -> tuple[Hunk, int]:
    """The hunk whose header is at an index, and the index behind its last line."""
    left = [1 if match[group] is None else int(match[group]) for group in (2, 3)]
    first = at
    at += 1
    signs = ""
    sides: tuple[list[bytes], list[bytes]] = ([], [])
    while left[0] > 0 or left[1] > 0:
        line = lines[at] if at < len(lines) else b"end"
        sign, text = (b" ", line) if line == b"\n" else (line[:1], line[1:])
        if sign == b"\\" and signs:
            _unend(sides, signs[-1])
        elif sign in (b" ", b"-", b"+"):
            signs += sign.decode()
            for side, other in ((0, b"+"), (1, b"-")):
                if sign != other:
                    sides[side].append(text)
                    left[side] -= 1
        if min(left) < 0 or sign not in (b" ", b"-", b"+", b"\\"):
            raise usage(
                f"is cut off, or damaged, in the hunk at line {first + 1}",
                "get the diff again",
                subject=name,
            )
        at += 1
    if at < len(lines) and lines[at].startswith(b"\\ ") and signs:
        _unend(sides, signs[-1])
        at += 1
    leading, trailing = (len(text) - len(text.lstrip(" ")) for text in (signs, signs[::-1]))
    old, new = map(tuple, sides)
    return Hunk(int(match[1]), old, new, leading, trailing), at


def _unend(sides: tuple[list[bytes], list[bytes]], sign: str) -> None:
    """Take the line feed off the last line that was read, as git's ``No newline`` says."""
    for side, other in zip(sides, "+-", strict=True):
        if sign != other:
            side[-1] = side[-1].removesuffix(b"\n")


def _paths(line: bytes) -> tuple[str, str]:
    """The paths in a line ``diff --git``: the only ones of a file that has no hunks."""
    words = line.decode(errors="replace").rstrip("\n").split(" ")
    if words[0] != "diff" or len(words) % 2:
        return "", ""
    half = len(words) // 2 + 1
    return _bare(" ".join(words[2:half])), _bare(" ".join(words[half:]))


def _path(text: bytes) -> str:
    return _bare(text.decode(errors="replace").partition("\t")[0].rstrip("\n"))


def _bare(path: str) -> str:
    """A path without git's prefix, which is one letter (``diff.mnemonicPrefix`` has others)."""
    return re.sub(r"^[abciow]/", "", path)


def _mail(text: bytes) -> list[tuple[str, str, str]]:
    """Subject, author and text of the mail that ends before a diff."""
    begins = [match.end() for match in _MAIL.finditer(text)]
    message = email.message_from_bytes(text[begins[-1] if begins else 0 :])
    if not message["Subject"]:
        return []
    subject = re.sub(r"^(\[[^\]]*\]\s*)+", "", " ".join(_header(message["Subject"]).split()))
    payload = message.get_payload(decode=True)
    body = payload.decode(errors="replace") if isinstance(payload, bytes) else ""
    return [
        (
            subject,
            _header(message["From"] or ""),
            re.split(r"^---\n", body, maxsplit=1, flags=re.M)[0].strip(),
        )
    ]


def _header(value: str | email.header.Header) -> str:
    """The text of a mail's header; as it stands, if its encoding cannot be read.

    The policies of :mod:`email` that decode by themselves fail for some addresses.
    """
    try:
        return str(email.header.make_header(email.header.decode_header(value)))
    except (email.errors.MessageError, LookupError, ValueError):
        return str(value)
