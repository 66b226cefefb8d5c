"""What upstream changed in a file between two releases."""

from __future__ import annotations

import re
from dataclasses import dataclass

from series import git

from review.outline import bodies

_HUNK = re.compile(rb"^@@ -\d+(?:,\d+)? \+(\d+)(?:,(\d+))? @@", re.MULTILINE)


@dataclass(frozen=True)
class Drift:
    """One file's.

    Attributes:
        path: of the file.
        added: lines.
        removed: lines.
        functions: by qualified name, "changed", "gone" or "new"; in their order.
    """

    path: str
    added: int
    removed: int
    functions: tuple[tuple[str, str], ...]


def drift(path: str, base: bytes, release: bytes) -> Drift:
    """What became of a file of ``base`` in ``release``.

    Raises:
        OverlayError: git is not there, or fails.
    """
    said = _diff(base, release, "--numstat")
    added, removed = (int(number) for number in said.split()[:2]) if said else (0, 0)
    before, after = (bodies(data.decode(errors="replace")) for data in (base, release))
    functions = [
        (name, "gone" if name not in after else "changed")
        for name, text in before.items()
        if after.get(name) != text
    ]
    functions += [(name, "new") for name in after if name not in before]
    return Drift(path, added, removed, tuple(functions))


def changed_lines(before: bytes, after: bytes) -> list[range]:
    """Where ``after`` differs, as ranges of its lines, from 1.

    An empty range stands where lines were taken out and none put in.

    Raises:
        OverlayError: git is not there, or fails.
    """
    found = []
    for header in _HUNK.finditer(_diff(before, after, "-U0")):
        first, count = int(header[1]), 1 if header[2] is None else int(header[2])
        # A hunk that puts nothing in is numbered by the line before it.
        first += count == 0
        found.append(range(first, first + count))
    return found


def _diff(before: bytes, after: bytes, form: str) -> bytes:
    options = ["--no-index", "--text", "--no-color", "--diff-algorithm=myers", form]
    files = {"before": before, "after": after}
    return git.run(["diff", *options, "--", *files], files, most=1)[0]
