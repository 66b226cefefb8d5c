"""The features and fixes that each line of a patch serves: those that its header names."""

from __future__ import annotations

from collections.abc import Iterator

from overlay.patches import Series, split_lines
from overlay.words import served
from series.upstream import Upstream

from review.vocabulary import NONE, Words


class Seams:
    """The words of the lines that patches put into upstream's files.

    Args:
        series: the patches.
        base: the release that they are for.
    """

    def __init__(self, series: Series, base: Upstream) -> None:
        self._origins = _origins(series, base)
        self._words = {patch.name: served(patch) or NONE for patch in series.patches}

    def of_patch(self, name: str) -> Words:
        """The words that a patch serves; none for one that all of them need."""
        return self._words.get(name, NONE)

    def at(self, path: str, line: int) -> Words:
        """The words of a line, one-based: those of its patch."""
        origins = self._origins.get(path, [])
        return self.of_patch(origins[line - 1]) if 0 < line <= len(origins) else NONE

    def lines(self) -> Iterator[tuple[str, int, Words]]:
        """Path, one-based line and words of every line that a patch put in."""
        for path, origins in self._origins.items():
            for line, origin in enumerate(origins, 1):
                if origin:
                    yield path, line, self.of_patch(origin)


def _origins(series: Series, base: Upstream) -> dict[str, list[str]]:
    """By path, the patch that each line of the overlaid file is from; empty for upstream's."""
    origins: dict[str, list[str]] = {}
    for patch in series.patches:
        for file in patch.files:
            path = file.path
            if path not in origins:
                origins[path] = [""] * len(split_lines(base.read(path)))
            for hunk in reversed(file.hunks):
                origins[path][hunk.old_at : hunk.old_at + len(hunk.old)] = [patch.name] * len(
                    hunk.new
                )
    return origins
