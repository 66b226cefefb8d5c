"""Lay a part of a series: all patches are applied, and each line remembers whose it is.

No place is searched for. The whole series applies at exact positions, so each line's neighbours
are known whichever patches are kept, and a part's patches are read off the same lines.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from overlay.patches import FilePatch, Hunk, Patch, Series, split_lines


@dataclass
class Line:
    """A line of a file, in any of its versions.

    Attributes:
        text: with its line feed.
        added_by: the patch that brings it; None for upstream's lines.
        removed_by: the patch that takes it away, if any.
    """

    text: bytes
    added_by: str | None = None
    removed_by: str | None = None

    def lives(self, patches: Collection[str]) -> bool:
        """Whether the line is in the file when these patches are on."""
        return (self.added_by is None or self.added_by in patches) and (
            self.removed_by not in patches
        )


def part(
    series: Series, kept: Collection[str], paths: Iterable[str], upstream: Callable[[str], bytes]
) -> Series:
    """The series without some of its patches.

    Args:
        series: the patches, which apply to upstream's files one after the other.
        kept: the names of those that stay. Of these, changes to other files than ``paths`` go.
        paths: the files.
        upstream: returns upstream's bytes of a path.

    Raises:
        OverlayError: a patch does not apply.
        DependentError: a patch that stays changes what one that goes has brought.
    """
    changes: dict[str, list[FilePatch]] = {}
    for path in paths:
        for name, file in _file(series, kept, path, upstream(path)):
            changes.setdefault(name, []).append(file)
    return Series(
        Patch(patch.name, patch.header, tuple(sorted(files, key=lambda file: file.path)))
        for patch in series.patches
        if (files := changes.get(patch.name))
    )


def _file(
    series: Series, kept: Collection[str], path: str, data: bytes
) -> Iterable[tuple[str, FilePatch]]:
    """Yield each kept patch's name and its change of one file."""
    lines = [Line(text) for text in split_lines(data)]
    names: list[str] = []
    for patch in series.patches:
        for file in patch.files:
            if file.path == path:
                data = file.apply(data, patch.name)  # refuses what is not at its place
                lines = _apply(lines, file, patch.name, kept)
                names += [patch.name] if patch.name in kept else []
    changed = [(at, line) for at, line in enumerate(lines) if line.added_by or line.removed_by]
    before: set[str] = set()
    for name in names:
        hunks = _hunks(changed, before, before | {name})
        before.add(name)
        if hunks:
            yield name, FilePatch(path, hunks)


def _apply(lines: Sequence[Line], file: FilePatch, name: str, kept: Collection[str]) -> list[Line]:
    """The lines with a patch's added to them, and marked where it takes them away."""
    live = [at for at, line in enumerate(lines) if line.removed_by is None]
    result: list[Line] = []
    end = 0
    for hunk in file.hunks:
        first, last = hunk.old_at, hunk.old_at + len(hunk.old)
        if hunk.old:
            start, stop = live[first], live[last - 1] + 1
        else:
            # Right behind the line above: what was removed below it, and put back without the
            # patch that removed it, had stood where that patch's own lines stand now.
            start = stop = live[first - 1] + 1 if first else 0
        if name in kept:
            below = live[last] if last < len(live) else len(lines)
            _refuse_dependent(lines, start, stop, below, (file.path, name), kept)
        result += lines[end:start]
        for line in lines[start:stop]:
            line.removed_by = line.removed_by or name
        result += lines[start:stop]
        result += [Line(text, name) for text in hunk.new]
        end = stop
    return [*result, *lines[end:]]


def _refuse_dependent(
    lines: Sequence[Line],
    start: int,
    stop: int,
    below: int,
    where: tuple[str, str],
    kept: Collection[str],
) -> None:
    """Raise if a change's place depends on a patch that is left out.

    Args:
        lines: of the file.
        start: of the lines that the change replaces.
        stop: behind them.
        below: the next line that the patch sees below its place.
        where: the file, and the patch.
        kept: the patches that stay.
    """
    replaced = lines[start:stop]
    gone = {line.added_by for line in replaced} | {line.removed_by for line in replaced}
    if not replaced:
        above = lines[start - 1].added_by if start else None
        following = lines[below].added_by if below < len(lines) else None
        if above == following:
            gone.add(above)  # in the middle of that patch's lines
        # The lines between have been removed. They come back with the patch's lines below, at
        # whose place they stood, or at no place that could be told from ours.
        gone |= {line.removed_by for line in lines[start:below]} - {following}
    for other in sorted(other for other in gone if other is not None and other not in kept):
        raise DependentError(where[0], where[1], other)


class DependentError(Exception):
    """A patch that is to stay changes lines of one that is to be left out.

    Attributes:
        path: the file.
        patch: the one that is to stay.
        other: the one that is to be left out.
    """

    def __init__(self, path: str, patch: str, other: str) -> None:
        self.path, self.patch, self.other = path, patch, other
        super().__init__(f"{path}: {patch} changes what {other} brings")


def _hunks(
    changed: Iterable[tuple[int, Line]], before: Collection[str], after: Collection[str]
) -> tuple[Hunk, ...]:
    """The change between two selections of patches.

    Args:
        changed: the lines that some patch adds or removes, each with its place among all lines.
        before: the names of the patches of one selection.
        after: those of the other.
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
