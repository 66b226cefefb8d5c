"""The page of a report: its Markdown as one HTML file that loads nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pages
from markdown_it import MarkdownIt
from markupsafe import Markup, escape

_SECTION = re.compile(r'<h2><a id="([^"]+)"></a>(.*?)</h2>')
#: The CSS class of a line of a diff, by its first character.
_SIGNS = {"+": "new", "-": "gone", "@": "hunk"}


def render(title: str, document: str) -> str:
    """Return a document as one HTML page.

    Args:
        title: of the page.
        document: Markdown.
    """
    parser = MarkdownIt("commonmark", {"html": True}).enable("table")
    parser.add_render_rule("fence", _fence)
    body = Markup(parser.render(visible(document)))  # noqa: S704 (it escapes what is not ours)
    sections = [
        (anchor, Markup(text).striptags())  # noqa: S704 (the renderer has escaped it)
        for anchor, text in _SECTION.findall(body)
    ]
    template = pages.environment(Path(__file__).parent).get_template("page.html.j2")
    return template.render(title=visible(title), body=body, sections=sections)


def visible(text: str) -> str:
    """Return the text with each invisible or control character as its code point."""
    return "".join(
        char if char.isprintable() or char in "\t\n" else f"<U+{ord(char):04X}>" for char in text
    )


def _fence(_: Any, tokens: Any, index: int, *__: Any) -> str:  # noqa: ANN401 (markdown-it's)
    """Return a block of code; lines of a diff have their colours."""
    lines = tokens[index].content.removesuffix("\n").split("\n")
    kinds = _SIGNS if tokens[index].info == "diff" else {}
    return "<pre>{}</pre>\n".format(
        "\n".join(
            f"<span class={kinds[line[:1]]}>{escape(line)}</span>"
            if line[:1] in kinds
            else str(escape(line))
            for line in lines
        )
    )
