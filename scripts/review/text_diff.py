"""Two texts line by line: rows of lines that belong together, and the lines left out between."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Literal, NamedTuple

#: Unchanged lines around a change.
CONTEXT = 3
#: The share of words that makes two lines versions of one another.
_ALIKE = 0.5
#: In blocks with more pairs of lines than this, lines are paired from the top.
_PAIRS = 2500

_WORD = re.compile(r"\w+|\s+|[^\w\s]")

Kind = Literal["same", "changed", "gone", "new"]


class Span(NamedTuple):
    """Characters of a line, from ``start`` up to ``end``."""

    start: int
    end: int


class Row(NamedTuple):
    """Two lines beside one another, by zero-based number; None if a side has no line.

    Attributes:
        left_spans: the differences within the left line; empty for the whole line.
        right_spans: the same of the right line.
    """

    kind: Kind
    left: int | None
    right: int | None
    left_spans: tuple[Span, ...] = ()
    right_spans: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Hunk:
    """Changes close together, with unchanged lines around them.

    Attributes:
        left: the zero-based unchanged lines on the left that are left out before the rows.
        right: the same lines on the right.
    """

    left: range
    right: range
    rows: tuple[Row, ...]


def lines_of(text: str) -> tuple[str, ...]:
    """The lines of a text, split at line feeds only."""
    lines = text.split("\n")
    return tuple(lines[:-1] if lines[-1] == "" else lines)


def compare(left: Sequence[str], right: Sequence[str]) -> list[Hunk]:
    """Compare two texts, with :data:`CONTEXT` unchanged lines around each change.

    Returns:
        The hunks. The last may have no rows, only lines left out; so has that of equal texts.
    """
    matcher = SequenceMatcher(None, left, right, autojunk=False)
    hunks: list[Hunk] = []
    ends = (0, 0)
    for group in matcher.get_grouped_opcodes(CONTEXT):
        _, i, _, j, _ = group[0]
        rows: list[Row] = []
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                rows += (Row("same", i1 + at, j1 + at) for at in range(i2 - i1))
            else:
                rows += _block(left, right, range(i1, i2), range(j1, j2))
        hunks.append(Hunk(range(ends[0], i), range(ends[1], j), tuple(rows)))
        _, _, i, _, j = group[-1]
        ends = (i, j)
    if ends != (len(left), len(right)):
        hunks.append(Hunk(range(ends[0], len(left)), range(ends[1], len(right)), ()))
    return hunks


def _block(left: Sequence[str], right: Sequence[str], old: range, new: range) -> list[Row]:
    """The rows of a changed block: lines alike are side by side."""
    rows: list[Row] = []
    i, j = old.start, new.start
    for at, to in [*_pairs(left, right, old, new), (old.stop, new.stop)]:
        # Pair the lines before the next ones that are alike, from the top.
        while i < at and j < to:
            rows.append(Row("changed", i, j))
            i, j = i + 1, j + 1
        rows += (Row("gone", line, None) for line in range(i, at))
        rows += (Row("new", None, line) for line in range(j, to))
        if at < old.stop:
            rows.append(Row("changed", at, to, *_spans(left[at], right[to])))
        i, j = at + 1, to + 1
    return rows


def _pairs(
    left: Sequence[str], right: Sequence[str], old: range, new: range
) -> list[tuple[int, int]]:
    """The pairs of lines of a block that are alike, in order, with the most words in common."""
    if not old or not new or len(old) * len(new) > _PAIRS:
        return []
    words = [Counter(_words(left[i])) for i in old]
    others = [Counter(_words(right[j])) for j in new]
    # best[i][j]: the sum of shares of old[i:] and new[j:].
    best = [[0.0] * (len(new) + 1) for _ in range(len(old) + 1)]
    alike = [[_share(one, other) for other in others] for one in words]
    for i in reversed(range(len(old))):
        for j in reversed(range(len(new))):
            pair = alike[i][j] + best[i + 1][j + 1] if alike[i][j] >= _ALIKE else 0.0
            best[i][j] = max(pair, best[i + 1][j], best[i][j + 1])
    pairs = []
    i = j = 0
    while i < len(old) and j < len(new):
        if best[i][j] == best[i + 1][j]:
            i += 1
        elif best[i][j] == best[i][j + 1]:
            j += 1
        else:
            pairs.append((old[i], new[j]))
            i, j = i + 1, j + 1
    return pairs


def _words(line: str) -> list[str]:
    return [word for word in _WORD.findall(line) if not word.isspace()]


def _share(one: Counter[str], other: Counter[str]) -> float:
    """The share of their words that two lines have in common, from 0 to 1."""
    total = sum(one.values()) + sum(other.values())
    return 2 * sum((one & other).values()) / total if total else 1.0


def _spans(left: str, right: str) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """The differences of two lines that are alike, by whole words."""
    one, other = _WORD.findall(left), _WORD.findall(right)
    old: list[Span] = []
    new: list[Span] = []
    at, to = _starts(one), _starts(other)
    for tag, i1, i2, j1, j2 in SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        if tag != "equal":
            old += [Span(at[i1], at[i2])] if i2 > i1 else []
            new += [Span(to[j1], to[j2])] if j2 > j1 else []
    return tuple(old), tuple(new)


def _starts(words: Sequence[str]) -> list[int]:
    """Where each word starts, and the end of the last."""
    starts = [0]
    for word in words:
        starts.append(starts[-1] + len(word))
    return starts
