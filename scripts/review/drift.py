"""What upstream changed in a file between two releases."""

from __future__ import annotations

from dataclasses import dataclass

from review import git
from review.outline import bodies


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
    options = ["--no-index", "--numstat", "--text", "--diff-algorithm=myers"]
    said, _ = git.run(
        ["diff", *options, "base", "release"], {"base": base, "release": release}, most=1
    )
    added, removed = (int(number) for number in said.split()[:2]) if said else (0, 0)
    before, after = (bodies(data.decode(errors="replace")) for data in (base, release))
    functions = [
        (name, "gone" if name not in after else "changed")
        for name, text in before.items()
        if after.get(name) != text
    ]
    functions += [(name, "new") for name in after if name not in before]
    return Drift(path, added, removed, tuple(functions))
