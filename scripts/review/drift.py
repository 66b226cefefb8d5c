"""Upstream's own changes to a file between two releases."""

from __future__ import annotations

import re
from dataclasses import dataclass

from series import git

from review.outline import bodies

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
    counts = _diff(base, release, "--numstat").split()[:2] or (0, 0)
    before, after = (bodies(data.decode(errors="replace")) for data in (base, release))
    functions = [
        (name, "gone" if name not in after else "changed")
        for name, text in before.items()
        if after.get(name) != text
    ]
    functions += [(name, "new") for name in after if name not in before]
    return Drift(int(counts[0]), int(counts[1]), tuple(functions))


def changed_lines(before: bytes, after: bytes) -> list[range]:
    """The lines of ``after`` that differ, one-based.

    An empty range marks a place where lines were removed and none were added.

    Raises:
        OverlayError: git is not there, or fails.
    """
    ranges = []
    for header in _HUNK.finditer(_diff(before, after, "-U0")):
        first, count = int(header[1]), 1 if header[2] is None else int(header[2])
        # A hunk that adds nothing is numbered by the line before it.
        first += count == 0
        ranges.append(range(first, first + count))
    return ranges


def _diff(before: bytes, after: bytes, form: str) -> bytes:
    options = ["--no-index", "--text", "--no-color", "--diff-algorithm=myers", form]
    files = {"before": before, "after": after}
    return git.run(["diff", *options, "--", *files], files, most=1)[0]
