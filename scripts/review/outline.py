"""The functions and classes of a module, and their lines."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Extent:
    """The lines of a function or a class.

    Attributes:
        name: its qualified name, as ``Class.method``.
        first: its first line, that of its first decorator, one-based.
        last: its last line.
        function: False for a class.
    """

    name: str
    first: int
    last: int
    function: bool


def extents(text: str) -> list[Extent]:
    """The functions and classes of a module, each before those within it.

    A module that this Python cannot parse has none.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    return list(_within(tree, ""))


def _within(parent: ast.AST, prefix: str) -> Iterator[Extent]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            name = prefix + node.name
            function = not isinstance(node, ast.ClassDef)
            yield Extent(name, first, node.end_lineno or first, function)
            yield from _within(node, f"{name}.")
        else:
            yield from _within(node, prefix)


def enclosing(definitions: Sequence[Extent], line: int) -> str:
    """The name of the innermost definition around a line; empty at the top level."""
    around = [extent for extent in definitions if extent.first <= line <= extent.last]
    return min(around, key=lambda extent: extent.last - extent.first).name if around else ""


def bodies(text: str) -> Mapping[str, str]:
    """The text of each function, by qualified name; functions of one name are joined."""
    lines = text.splitlines(keepends=True)
    texts: dict[str, str] = {}
    for extent in extents(text):
        if extent.function:
            body = "".join(lines[extent.first - 1 : extent.last])
            texts[extent.name] = texts.get(extent.name, "") + body
    return texts
