"""The page of a review: its Markdown as HTML, with diffs side by side and Python highlighted."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from difflib import SequenceMatcher
from functools import cache
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

import pages
from markdown_it import MarkdownIt
from markupsafe import Markup, escape
from pygments.lexers import PythonLexer
from pygments.token import Token

from review.pieces import EXCERPT

#: Unchanged lines around a change; those between are folded away.
CONTEXT = 3
#: The share of words that makes two lines versions of one another.
_ALIKE = 0.5
#: The CSS class of each verdict and fate.
_MOODS = {
    **dict.fromkeys(("unchanged", "applies", "same"), "good"),
    **dict.fromkeys(("needs eyes", "moved", "obsolete", "adopted", "body changed"), "eyes"),
    **dict.fromkeys(("changed", "new"), "eyes"),
    **dict.fromkeys(("mended", "mended in part", "not known"), "eyes"),
    **dict.fromkeys(("conflicts", "gone", "signature changed"), "bad"),
}
#: The tokens that are coloured, each with its CSS class; the first match counts.
#: All others are plain text: a page has thousands of lines, and each span is one element more.
_CLASSES = {
    Token.Comment: "c",
    Token.Literal.String: "s",
    Token.Literal.Number: "m",
    Token.Keyword: "k",
    Token.Operator.Word: "k",
    Token.Name.Builtin: "b",
    Token.Name.Exception: "b",
    Token.Name.Decorator: "d",
    Token.Name.Function: "f",
    Token.Name.Class: "f",
}
#: Visible stand-ins for characters that are invisible or change the order of others.
_VISIBLE = {
    **{code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"},
    **{code: f"<U+{code:04X}>" for code in (0x7F, *range(0x80, 0xA0), 0xAD, 0xFEFF, 0x61C)},
    **{code: f"<U+{code:04X}>" for code in (*range(0x200B, 0x2010), *range(0x2028, 0x202F))},
    **{code: f"<U+{code:04X}>" for code in (*range(0x2060, 0x2070), *range(0xD800, 0xE000))},
}
_HUNK = re.compile(r"@@ -(\d+) \+(\d+) @@")
_SECTION = re.compile(r'<h2><a id="([^"]+)"></a>(.*?) <a [^>]*>#</a></h2>')
_BEHIND_HEAD = re.compile("<table|<h2")
_DEFINITION = re.compile(r"\s*((?:async )?def|class)\s+(\w+)")
_WORD = re.compile(r"\n|\w+|[^\S\n]+|[^\w\s]")

#: A line as words, each with its CSS class; "" is uncoloured.
Line = Sequence[tuple[str, str]]


def render(title: str, document: str) -> str:
    """The document as one HTML page that loads nothing else.

    Args:
        title: of the page.
        document: the Markdown of :func:`review.markdown.document`.
    """
    parser = MarkdownIt("commonmark", {"html": True}).enable("table")
    parser.add_render_rule("fence", _fence)
    parser.add_render_rule("strong_open", _strong)
    parser.add_render_rule("link_open", _link)
    body = Markup(parser.render(visible(document)))  # noqa: S704 (it escapes what is not ours)
    sections = [
        (anchor, Markup(text).striptags())  # noqa: S704 (the renderer has escaped it)
        for anchor, text in _SECTION.findall(body)
    ]
    template = pages.environment(Path(__file__).parent).get_template("page.html.j2")
    # What one must know comes first, and then the way to the rest.
    end = found.start() if (found := _BEHIND_HEAD.search(body)) else len(body)
    return template.render(
        title=visible(title), head=body[:end], body=body[end:], sections=sections
    )


def visible(text: str) -> str:
    """The text with stand-ins for its invisible and control characters."""
    return text.translate(_VISIBLE)


def _strong(self: Any, tokens: Any, index: int, *rest: Any) -> str:  # noqa: ANN401 (markdown-it's)
    """The start of a bold text; a verdict or a fate has its colour."""
    if mood := _MOODS.get(tokens[index + 1].content):
        tokens[index].attrSet("class", mood)
    return str(self.renderToken(tokens, index, *rest))


def _link(self: Any, tokens: Any, index: int, *rest: Any) -> str:  # noqa: ANN401 (markdown-it's)
    """The start of a link; a heading's to itself is no stop of the tab key."""
    if tokens[index + 1].content == "#":
        tokens[index].attrSet("tabindex", "-1")
        tokens[index].attrSet("aria-label", "link to this place")
    return str(self.renderToken(tokens, index, *rest))


def _fence(_: Any, tokens: Any, index: int, *__: Any) -> str:  # noqa: ANN401 (markdown-it's)
    """A unified diff as tables with two sides; without headers of hunks there are no numbers."""
    before, after, *lines = tokens[index].content.removesuffix("\n").split("\n")
    tables = []
    end = None if tokens[index].info == EXCERPT else 1
    for number, line in enumerate(lines, 1):
        if header := _HUNK.fullmatch(line):
            old, new = int(header[1]), int(header[2])
            if end is not None and old > end:
                tables.append(Markup("<p class=gap>{}</p>").format(_left_out(old - end, end)))
            body = list(takewhile(lambda line: line[0] != "@", lines[number:]))
            end = old + sum(line[0] != "+" for line in body)
            tables.append(_table(body, old, new))
    return Markup('<div class="diff{}"><div class=heads><b>{}</b><b>{}</b></div>{}</div>\n').format(
        "" if tables else " bare",
        before[4:],
        after[4:],
        Markup("").join(tables or [_table(lines, 1, 1)]),
    )


def _table(lines: Sequence[str], old: int, new: int) -> Markup:
    """A hunk; unchanged lines that are not near a change are folded away.

    Args:
        lines: with a sign, as in a unified diff.
        old: the number of the first line on the left.
        new: the same on the right.
    """
    left, right = (
        enumerate(highlighted([line[1:] for line in lines if line[0] != sign]), start)
        for start, sign in ((old, "+"), (new, "-"))
    )
    signs = "".join(line[0] for line in lines)
    rows = []
    for stretch in re.finditer(r" +|-+\+*|\++", signs):
        begin, end = stretch.span()
        folded = range(begin + CONTEXT * (begin > 0), end - CONTEXT * (end < len(signs)))
        if signs[begin] != " ":
            removed, added = stretch[0].count("-"), stretch[0].count("+")
            for n in range(max(removed, added)):
                one = next(left) if n < removed else None
                rows.append(_row(one, next(right) if n < added else None))
            continue
        for number in range(begin, end):
            one, other = next(left), next(right)
            if number not in folded:
                rows.append(_row(one, other))
            elif number == folded.start:
                hidden = [line[1:] for line in lines[folded.start : folded.stop]]
                inside = next(filter(None, map(_DEFINITION.match, reversed(hidden))), None)
                rows.append(
                    Markup(
                        "</table><details class=gap><summary>{} {}</summary>"
                        "<pre>\n{}</pre></details><table>"
                    ).format(
                        _left_out(len(folded), one[0]),
                        f"({inside[0].strip()})" if inside else "",
                        "\n".join(hidden),
                    )
                )
    return Markup("<table>{}</table>").format(Markup("\n").join(rows))


def _left_out(number: int, first: int) -> str:
    """The words for unchanged lines that are not shown."""
    return f"{number:,} unchanged line{'s' * (number > 1)} from {first:,}"


def _row(left: tuple[int, Line] | None, right: tuple[int, Line] | None) -> Markup:
    """A row of a table; its cells need no end tags, which halves the markup."""
    marks: tuple[set[int], set[int]] = (set(), set())
    kind = " class=g" if right is None else " class=n"
    if left and right:
        kind = "" if left[1] == right[1] else " class=x"
        matcher = SequenceMatcher(None, left[1], right[1], autojunk=False)
        if kind and matcher.ratio() >= _ALIKE:
            for tag, i, i_end, j, j_end in matcher.get_opcodes():
                if tag != "equal":
                    marks[0].update(range(i, i_end))
                    marks[1].update(range(j, j_end))
    cells = (
        Markup("<td>{}<td>{}").format(side[0], _html(side[1], marked)) if side else "<td><td>"
        for side, marked in zip((left, right), marks, strict=True)
    )
    return Markup("<tr{}>{}").format(Markup(kind), Markup("").join(map(Markup, cells)))  # noqa: S704


def _html(line: Line, marked: Collection[int]) -> Markup:
    """A line as HTML, with the words at the given indices emphasised."""
    parts = []
    words = ((kind, index in marked, word) for index, (kind, word) in enumerate(line))
    for (kind, mark), group in groupby(words, key=lambda word: word[:2]):
        piece = escape("".join(word for *_, word in group))
        if kind:
            piece = Markup("<span class={}>{}</span>").format(kind, piece)
        parts.append(Markup("<mark>{}</mark>").format(piece) if mark else piece)
    return Markup("").join(parts)


def highlighted(lines: Sequence[str]) -> list[Line]:
    """Lines of Python in words, each with the CSS class of its token."""
    split: list[list[tuple[str, str]]] = [[]]
    # Unprocessed: nothing is stripped or put in, so that lines stay where they are.
    for _, token, value in PythonLexer().get_tokens_unprocessed("\n".join(lines)):
        for word in _WORD.findall(value):
            if word == "\n":
                split.append([])
            else:
                split[-1].append((_css_class(token), word))
    return [tuple(line) for line in split]


@cache
def _css_class(token: object) -> str:
    return next((name for kind, name in _CLASSES.items() if token in kind), "")
