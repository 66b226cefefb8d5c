"""Python as highlighted HTML, line by line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, lru_cache

from markupsafe import Markup, escape
from pygments.lexers import PythonLexer
from pygments.token import Token

from review.text_diff import Span

#: The tokens that are coloured, each with its CSS class; the first match counts.
#: All others are plain text: a page has thousands of lines, and each span is one element more.
_CLASSES = (
    (Token.Comment, "c"),
    (Token.Literal.String, "s"),
    (Token.Literal.Number, "m"),
    (Token.Keyword, "k"),
    (Token.Operator.Word, "k"),
    (Token.Name.Builtin, "b"),
    (Token.Name.Exception, "b"),
    (Token.Name.Decorator, "d"),
    (Token.Name.Function, "f"),
    (Token.Name.Class, "f"),
)

#: Visible stand-ins for characters that are invisible or change the order of others.
_VISIBLE = {
    **{code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"},
    **{code: f"<U+{code:04X}>" for code in (0x7F, *range(0x80, 0xA0), 0xAD, 0xFEFF, 0x61C)},
    **{code: f"<U+{code:04X}>" for code in (*range(0x200B, 0x2010), *range(0x2028, 0x202F))},
    **{code: f"<U+{code:04X}>" for code in (*range(0x2060, 0x2070), *range(0xD800, 0xE000))},
}

#: A line as runs of text, each with its CSS class; "" is uncoloured.
Line = tuple[tuple[str, str], ...]


def visible(text: str) -> str:
    """The text with stand-ins for its invisible and control characters."""
    return text.translate(_VISIBLE)


@lru_cache(maxsize=256)
def highlighted(text: str) -> tuple[Line, ...]:
    """The lines of a Python text, split at line feeds only."""
    lines: list[Line] = []
    line: list[tuple[str, str]] = []
    for kind, value in _tokens(text):
        for at, part in enumerate(value.split("\n")):
            if at:
                lines.append(tuple(line))
                line = []
            if not part:
                continue
            if line and line[-1][0] == kind:
                line[-1] = (kind, line[-1][1] + part)
            else:
                line.append((kind, part))
    if line:
        lines.append(tuple(line))
    return tuple(lines)


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    # Unprocessed: nothing is stripped or put in, so that lines stay where they are.
    for _, token, value in PythonLexer().get_tokens_unprocessed(text):
        yield _short(token), value


@cache
def _short(token: object) -> str:
    """The CSS class of a type of token."""
    return next((short for kind, short in _CLASSES if token in kind), "")


def html(line: Line, spans: Sequence[Span] = ()) -> Markup:
    """A line as HTML, with ``spans`` emphasised."""
    parts = []
    at = 0
    for kind, text in line:
        for start, end, inside in _cut(at, at + len(text), spans):
            piece = escape(visible(text[start - at : end - at]))
            if kind:
                piece = Markup("<span class={}>{}</span>").format(kind, piece)
            parts.append(Markup("<mark>{}</mark>").format(piece) if inside else piece)
        at += len(text)
    return Markup("").join(parts)


def _cut(start: int, end: int, spans: Sequence[Span]) -> Iterator[tuple[int, int, bool]]:
    """The stretch from start to end in pieces, each with True if a span covers it."""
    for span in spans:
        if span.end <= start or span.start >= end:
            continue
        if span.start > start:
            yield start, span.start, False
        yield max(start, span.start), min(end, span.end), True
        start = min(end, span.end)
    if start < end:
        yield start, end, False
