"""Derive a part of a series: apply all patches, and mark each line with its patches.

The whole series applies at exact line numbers, without a search. The patches of a part are then
generated from the marked lines.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from overlay.patches import FilePatch, Hunk, Patch, Series, split_lines


@dataclass
class Line:
    """A line of any version of a file, with its line feed.

    ``added_by`` and ``removed_by`` name patches. ``added_by`` is None for upstream's lines,
    ``removed_by`` for lines that no patch removes.
    """

    text: bytes
    added_by: str | None = None
    removed_by: str | None = None

    def lives(self, patches: Collection[str]) -> bool:
        """Return whether the line is in the file with these patches applied."""
        added = self.added_by is None or self.added_by in patches
        return added and self.removed_by not in patches


def part(
    series: Series, kept: Collection[str], paths: Iterable[str], upstream: Callable[[str], bytes]
) -> Series:
    """Return the series reduced to the patches ``kept`` and the files ``paths``.

    ``upstream`` returns upstream's bytes of a path.

    Raises:
        OverlayError: a patch does not apply.
        DependentError: a kept patch changes lines that a dropped patch adds.
    """
    changes: dict[str, list[FilePatch]] = {}
    for path in paths:
        changed = _changed(series, kept, path, upstream(path))
        before: set[str] = set()
        for name in [name for name, _ in series.changes(path) if name in kept]:
            if hunks := _hunks(changed, before, before | {name}):
                changes.setdefault(name, []).append(FilePatch(path, hunks))
            before.add(name)
    return Series(
        Patch(patch.name, patch.header, tuple(sorted(files, key=lambda file: file.path)))
        for patch in series.patches
        if (files := changes.get(patch.name))
    )


def _changed(
    series: Series, kept: Collection[str], path: str, data: bytes
) -> list[tuple[int, Line]]:
    """Return the lines of a file that patches add or remove, with their indices."""
    lines = [Line(text) for text in split_lines(data)]
    for name, file in series.changes(path):
        data = file.apply(data, name)  # raises if a line does not match
        lines = _apply(lines, file, name, kept)
    return [(at, line) for at, line in enumerate(lines) if line.added_by or line.removed_by]


def _apply(lines: Sequence[Line], file: FilePatch, name: str, kept: Collection[str]) -> list[Line]:
    """Return the lines with a patch's additions inserted and its removals marked.

    Raises DependentError if a kept patch depends on a dropped one.
    """
    live = [at for at, line in enumerate(lines) if line.removed_by is None]
    result: list[Line] = []
    end = 0
    for hunk in file.hunks:
        first, last = hunk.old_at, hunk.old_at + len(hunk.old)
        if hunk.old:
            start, stop = live[first], live[last - 1] + 1
        else:
            # Insert right behind the preceding live line. If a part restores removed lines there,
            # they come after the insertion.
            start = stop = live[first - 1] + 1 if first else 0
        if name in kept:
            # The change must not depend on lines or on a position that a dropped patch makes.
            gone = {by for line in lines[start:stop] for by in (line.added_by, line.removed_by)}
            if start == stop:
                below = live[last] if last < len(live) else len(lines)
                above = lines[start - 1].added_by if start else None
                following = lines[below].added_by if below < len(lines) else None
                if above == following:
                    gone.add(above)  # inserted between lines of one patch
                # Removed lines in between return if their patch is left out. Their order relative
                # to the insertion is known only if that patch also adds the line below, which they
                # then replace.
                gone |= {line.removed_by for line in lines[start:below]} - {following}
            for other in sorted(by for by in gone if by is not None and by not in kept):
                raise DependentError(file.path, name, other)
        result += lines[end:start]
        for line in lines[start:stop]:
            line.removed_by = line.removed_by or name
        result += lines[start:stop]
        result += [Line(text, name) for text in hunk.new]
        end = stop
    return [*result, *lines[end:]]


class DependentError(Exception):
    """In the file ``path``, a change of the kept ``patch`` depends on the dropped ``other``."""

    def __init__(self, path: str, patch: str, other: str) -> None:
        self.path, self.patch, self.other = path, patch, other
        super().__init__(f"{path}: {patch} changes lines that {other} adds")


def _hunks(
    changed: Iterable[tuple[int, Line]], before: Collection[str], after: Collection[str]
) -> tuple[Hunk, ...]:
    """Return the hunks from a file with the patches ``before`` to the file with ``after``.

    ``changed`` holds all lines that patches add or remove, with the lines' indices.
    """
    hunks: list[Hunk] = []
    old: list[bytes] = []
    new: list[bytes] = []
    old_at = new_at = behind = 0

    def unchanged(count: int) -> None:
        nonlocal old, new, old_at, new_at
        if count and (old or new):
            hunks.append(Hunk(old_at, tuple(old), new_at, tuple(new)))
            old_at, new_at = old_at + len(old), new_at + len(new)
            old, new = [], []
        old_at, new_at = old_at + count, new_at + count

    for at, line in changed:
        unchanged(at - behind)
        behind = at + 1
        was, is_now = line.lives(before), line.lives(after)
        if was and is_now:
            unchanged(1)
        elif was:
            old.append(line.text)
        elif is_now:
            new.append(line.text)
    unchanged(1)
    return tuple(hunks)
