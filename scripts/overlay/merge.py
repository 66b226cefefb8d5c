"""Derive a part of a series.

A patch has the line numbers of a file with all patches before it. The whole series is applied to
two lists: the lines of that file, and the lines of the part. A line has one number in both.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from overlay.errors import damaged
from overlay.patches import FilePatch, Hunk, Patch, Series, split_lines


def part(
    series: Series, kept: Collection[str], paths: Iterable[str], upstream: Callable[[str], bytes]
) -> Series:
    r"""Return the series reduced to the patches ``kept`` and the files ``paths``.

    ``upstream`` returns upstream's bytes of a path.

    Raises:
        OverlayError: a patch does not apply, or a kept patch changes lines that a dropped patch
            adds or removes.

    >>> one = FilePatch("vllm/f.py", (Hunk(0, (), 0, (b"import one\n",)),))
    >>> two = FilePatch("vllm/f.py", (Hunk(1, (b"A = 1\n",), 1, (b"A = 2\n",)),))
    >>> series = Series([Patch("one", "", (one,)), Patch("two", "", (two,))])
    >>> part(series, {"two"}, ["vllm/f.py"], lambda _: b"A = 1\n").apply("vllm/f.py", b"A = 1\n")
    b'A = 2\n'
    """
    changes: dict[str, list[FilePatch]] = {}
    for path in paths:
        data = upstream(path)
        numbers = itertools.count()
        # The first and the last stand for the file's ends.
        whole = [next(numbers) for _ in range(len(split_lines(data)) + 2)]
        lines = [*whole]
        for name, file in series.changes(path):
            data = file.apply(data, name)  # raises if a line does not match
            hunks: list[Hunk] = []
            shift = 0
            for hunk in file.hunks:
                at, behind = hunk.new_at + 1, hunk.new_at + 1 + len(hunk.old)
                new = [next(numbers) for _ in hunk.new]
                if name in kept:
                    start = _place(lines, whole[at - 1 : behind + 1])
                    if start is None:
                        raise damaged(f"{name} changes lines of a patch that is left out", path)
                    lines[start : start + len(hunk.old)] = new
                    hunks.append(replace(hunk, old_at=start - 1 - shift, new_at=start - 1))
                    shift += len(hunk.new) - len(hunk.old)
                whole[at:behind] = new
            if hunks:
                changes.setdefault(name, []).append(FilePatch(path, tuple(hunks)))
    return Series(
        Patch(patch.name, patch.header, tuple(sorted(files, key=lambda file: file.path)))
        for patch in series.patches
        if (files := changes.get(patch.name))
    )


def _place(lines: Sequence[int], around: Sequence[int]) -> int | None:
    """Return the index in ``lines`` of the lines that a hunk removes; None if that is not certain.

    ``around`` are these lines, with the line above and the line below. An insertion comes between
    these two; if only one of them is in ``lines``, next to it.
    """
    above, *old, below = around
    if old:
        start = lines.index(old[0]) if old[0] in lines else 0
        return start if [*lines[start : start + len(old)]] == old else None
    places = {lines.index(above) + 1} if above in lines else set()
    places |= {lines.index(below)} if below in lines else set()
    return places.pop() if len(places) == 1 else None
