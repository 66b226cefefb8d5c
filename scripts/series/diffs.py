"""Read diffs that other tools made: git's, with context lines, alone or as mails."""

from __future__ import annotations

import email
import email.policy
import re
from dataclasses import dataclass, field

from overlay.errors import usage
from overlay.patches import split_lines

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")
#: The line that begins each commit in what `git format-patch` writes.
_MAIL = re.compile(rb"^From [0-9a-f]{7,64} .*\n", re.MULTILINE)
_NOWHERE = "/dev/null"


@dataclass(frozen=True)
class Hunk:
    """A hunk as it stands in the diff.

    Attributes:
        line: the one-based line of the old file that it begins at.
        text: its lines, with the one that begins with ``@@``.
    """

    line: int
    text: bytes


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
    def obstacle(self) -> str | None:
        """Why it is no change to the lines of a file; None if it is one."""
        if self._has(b"rename ", b"copy "):
            return "renames or copies a file"
        if self.old == _NOWHERE or self._has(b"new file "):
            return "adds a file"
        if self.new == _NOWHERE or self._has(b"deleted file "):
            return "deletes a file"
        if self._has(b"GIT binary ", b"Binary files "):
            return "changes a binary file"
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
            end = _end_of_hunk(lines, at, match, name)
            current.hunks.append(Hunk(int(match[1]), b"".join(lines[at:end])))
            at = end
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


def _end_of_hunk(lines: list[bytes], at: int, match: re.Match[bytes], name: str) -> int:
    """The index behind a hunk's last line."""
    old, new = (1 if match[group] is None else int(match[group]) for group in (2, 3))
    first = at
    at += 1
    while old > 0 or new > 0:
        sign = lines[at][:1] if at < len(lines) else b"end"
        if sign not in (b" ", b"-", b"+", b"\\", b"\n"):
            raise usage(
                f"is cut off, or damaged, in the hunk at line {first + 1}",
                "get the diff anew",
                subject=name,
            )
        old -= sign in (b" ", b"-", b"\n")
        new -= sign in (b" ", b"+", b"\n")
        at += 1
    return at + (at < len(lines) and lines[at].startswith(b"\\ "))


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
    message = email.message_from_bytes(
        text[begins[-1] if begins else 0 :], policy=email.policy.default
    )
    if not message["Subject"]:
        return []
    subject = re.sub(r"^(\[[^\]]*\]\s*)+", "", " ".join(str(message["Subject"]).split()))
    payload = message.get_payload(decode=True)
    body = payload.decode(errors="replace") if isinstance(payload, bytes) else ""
    return [
        (
            subject,
            str(message["From"] or ""),
            re.split(r"^---\n", body, maxsplit=1, flags=re.M)[0].strip(),
        )
    ]
