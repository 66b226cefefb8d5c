"""Pieces of Markdown that show any text unchanged: spans, tables, folded parts and diffs."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from difflib import SequenceMatcher, ndiff
from urllib.parse import quote

#: In changed blocks with more pairs of lines than this, no similar lines are looked for.
_PAIRS = 2500
#: The language of a diff of a part of a file, and that of a whole one.
EXCERPT, DIFF = "diff excerpt", "diff"
_HUNK = re.compile(r"^@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@.*")
#: Versions that upstream has a tag for.
_TAGGED = re.compile(r"\d+(\.\d+)+(rc\d+|\.post\d+)?")
_UPSTREAM = "https://github.com/vllm-project/vllm/blob"
_MARKUP = re.compile(r"[\\`*_\[\]<>#|~$&]|^[-+=]|^\d+(?=[.)])")


def diff(
    before: tuple[str, Sequence[str]],
    after: tuple[str, Sequence[str]],
    numbered: bool = True,
    context: int | None = None,
) -> str:
    """A fenced unified diff in which similar lines follow one another.

    Args:
        before: the name of the text on the left, and its lines.
        after: the same on the right.
        numbered: whether hunks have a header.
        context: the number of unchanged lines around each change; None for all.
    """
    (old_name, left), (new_name, right) = before, after
    lines = [f"--- {one_line(old_name)}", f"+++ {one_line(new_name)}"]
    # Its heuristic spares minutes if thousands of lines are alike.
    matcher = SequenceMatcher(None, left, right, autojunk=min(len(left), len(right)) > 10_000)
    for group in matcher.get_grouped_opcodes(len(left) if context is None else context):
        _, first, _, start, _ = group[0]
        lines += [f"@@ -{first + 1} +{start + 1} @@"] if numbered else []
        for tag, i, i_end, j, j_end in group:
            old, new = left[i:i_end], right[j:j_end]
            if tag == "equal":
                lines += (f" {line}" for line in old)
            elif tag == "replace" and len(old) * len(new) <= _PAIRS:
                lines += (line[0] + line[2:] for line in ndiff(old, new) if line[0] != "?")
            else:
                lines += (f"-{line}" for line in old)
                lines += (f"+{line}" for line in new)
    if len(lines) == 2:
        return "No line differs."
    return fenced(lines)


def hunks(before: str, after: str, unified: str) -> str:
    """A unified diff, as git makes it, as a fenced one.

    Args:
        before: the name of the text on the left.
        after: the same on the right.
        unified: the diff, from the first hunk on.
    """
    lines = [
        _HUNK.sub(r"@@ -\1 +\2 @@", line)
        for line in lines_of(unified)
        if not line.startswith("\\")  # the last line has no end
    ]
    return fenced([f"--- {one_line(before)}", f"+++ {one_line(after)}", *lines], EXCERPT)


def fenced(lines: Sequence[str], language: str = DIFF) -> str:
    """Lines that no reader of Markdown takes for markup."""
    longest = max(len(run) for line in lines for run in re.findall("~*", line))
    fence = "~" * max(longest + 1, 3)
    return "\n".join([f"{fence}{language}", *lines, fence])


def lines_of(text: str) -> list[str]:
    """The lines of a text, split at line feeds only."""
    return text.removesuffix("\n").split("\n") if text else []


def anchor_of(name: str) -> str:
    """The anchor of a patch or a file."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", name)


def headed(level: int, anchor: str, text: str) -> str:
    """A heading with an anchor, and a link to itself."""
    return f'{"#" * level} <a id="{anchor}"></a>{text} [#](#{anchor})'


def table(heading: str, columns: Sequence[str], lines: Sequence[str]) -> str:
    """A heading, and lines below it: rows of a table if there are columns."""
    head = [heading, ""] if heading else []
    if columns and lines:
        head += [row(*columns), row(*("---" for _ in columns))]
    return "\n".join([*head, *lines]).rstrip()


def folded(summary: str, body: str, unfolded: bool = False) -> str:
    """A text behind its summary."""
    text = html.escape(one_line(summary))
    return f"<details{' open' * unfolded}>\n<summary>{text}</summary>\n\n{body}\n\n</details>"


def at(version: str, place: str, in_table: bool = False) -> str:
    """A place in a release, with a link to upstream's file if there is a tag for the release.

    Args:
        version: of the release.
        place: a path and a line, with a colon between.
        in_table: as in :func:`code`.
    """
    path, _, line = place.rpartition(":")
    span = code(place, in_table)
    if not _TAGGED.fullmatch(version) or not line.isdigit():
        return span
    return f"[{span}]({_UPSTREAM}/v{version}/{quote(path)}#L{line})"


def row(*cells: str) -> str:
    """A row of a table."""
    return f"| {' | '.join(cells)} |"


def counted(number: int, singular: str, plural: str = "") -> str:
    """A number of things."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def escape(text: str) -> str:
    """Text that Markdown shows unchanged, on one line, without mentions or links."""
    escaped = _MARKUP.sub(_escaped, one_line(text))
    # GitHub links @name and #1 even where they are escaped.
    escaped = re.sub(r"@(?=\w)", "@<!-- -->", escaped)
    return re.sub(r"\\#(?=\d)", r"\\#<!-- -->", escaped)


def _escaped(match: re.Match[str]) -> str:
    # After a number that would begin a list, the backslash comes behind it.
    return match[0] + "\\" if match[0].isdigit() else "\\" + match[0]


def code(text: str, in_table: bool = False) -> str:
    """Text as a code span on one line, with bars escaped in a table."""
    line = one_line(text)
    longest = max((len(run) for run in re.findall("`+", line)), default=0)
    fence = "`" * (longest + 1)
    padded = f" {line} " if line.startswith("`") or line.endswith("`") else line
    span = f"{fence}{padded or ' '}{fence}"
    return span.replace("|", "\\|") if in_table else span


def one_line(text: str) -> str:
    """A text with each white space as one blank."""
    return " ".join(text.split())
