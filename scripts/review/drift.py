"""Upstream's own changes to a file between two releases."""

from __future__ import annotations

import re
from dataclasses import dataclass

from overlay.patches import split_lines
from series import git

from review.outline import extents

_HUNK = re.compile(rb"^@@ -\d+(?:,\d+)? \+(\d+)(?:,(\d+))? @@", re.MULTILINE)


@dataclass(frozen=True)
class Drift:
    """The changes to one file.

    Attributes:
        added: lines.
        removed: lines.
        functions: qualified names in their order, each "changed", "gone" or "new".
    """

    added: int
    removed: int
    functions: tuple[tuple[str, str], ...]


def drift(base: bytes, release: bytes) -> Drift:
    """Compare a file of one release with that of another.

    Raises:
        OverlayError: git is not there, or fails.
    """
    added, removed = (
        sum(map(len, changed_lines(*texts))) for texts in ((base, release), (release, base))
    )
    before, after = _bodies(base), _bodies(release)
    functions = [
        (name, "gone" if name not in after else "changed")
        for name, text in before.items()
        if after.get(name) != text
    ]
    functions += [(name, "new") for name in after if name not in before]
    return Drift(added, removed, tuple(functions))


def changed_lines(before: bytes, after: bytes) -> list[range]:
    """The lines of ``after`` that differ, one-based.

    An empty range marks a place where lines were removed and none were added.

    Raises:
        OverlayError: git is not there, or fails.
    """
    options = ["--no-index", "--text", "--no-color", "--diff-algorithm=myers", "-U0"]
    files = {"before": before, "after": after}
    ranges = []
    for header in _HUNK.finditer(git.run(["diff", *options, "--", *files], files, most=1)[0]):
        first, count = int(header[1]), 1 if header[2] is None else int(header[2])
        # A hunk that adds nothing is numbered by the line before it.
        first += count == 0
        ranges.append(range(first, first + count))
    return ranges


def _bodies(text: bytes) -> dict[str, bytes]:
    """The text of each function, by qualified name; functions of one name are joined."""
    lines = split_lines(text)
    bodies: dict[str, bytes] = {}
    for extent in extents(text):
        if extent.function:
            body = b"".join(lines[extent.first - 1 : extent.last])
            bodies[extent.name] = bodies.get(extent.name, b"") + body
    return bodies
