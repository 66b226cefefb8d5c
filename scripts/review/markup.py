"""Pieces of Markdown that show any text unchanged: spans, tables, folded parts and diffs."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from urllib.parse import quote

#: Versions that upstream has a tag for.
_TAGGED = re.compile(r"\d+(\.\d+)+(rc\d+|\.post\d+)?")
_UPSTREAM = "https://github.com/vllm-project/vllm/blob"
_MARKUP = re.compile(r"[\\`*_\[\]<>#|~$&]|^[-+=]")


def fenced(lines: Sequence[str], language: str) -> str:
    """Return lines that no reader of Markdown takes for markup."""
    longest = max((len(run) for line in lines for run in re.findall("~*", line)), default=0)
    fence = "~" * max(longest + 1, 3)
    return "\n".join([f"{fence}{language}", *lines, fence])


def visible(text: str) -> str:
    """Return the text with each invisible or control character as its code point."""
    return "".join(
        char if char.isprintable() or char in "\t\n" else f"<U+{ord(char):04X}>" for char in text
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of cells that are Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def folded(summary: str, body: str) -> str:
    """Return a text behind its summary."""
    text = html.escape(one_line(summary))
    return f"<details>\n<summary>{text}</summary>\n\n{body}\n\n</details>"


def at(version: str, place: str) -> str:
    """Return a place in a release, with a link to upstream's file if the release has a tag.

    Args:
        version: of the release.
        place: a path and a line, with a colon between.
    """
    path, _, line = place.rpartition(":")
    span = code(place)
    if not _TAGGED.fullmatch(version) or not line.isdigit():
        return span
    return f"[{span}]({_UPSTREAM}/v{version}/{quote(path)}#L{line})"


def escape(text: str) -> str:
    """Return text that Markdown shows unchanged, on one line."""
    return _MARKUP.sub(r"\\\g<0>", one_line(text))


def code(text: str) -> str:
    """Return text as a code span on one line, with bars escaped as tables need it, if it can be."""
    line = one_line(text)
    return escape(text) if "`" in line or not line else f"`{line}`".replace("|", "\\|")


def one_line(text: str) -> str:
    """Return a text with each white space as one blank."""
    return " ".join(text.split())
