"""The functions and classes of a module, and their lines."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

#: What statements are in: a function within an expression has no name.
_BLOCKS = (ast.stmt, ast.excepthandler, ast.match_case)


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


@lru_cache(maxsize=64)
def extents(text: bytes) -> Sequence[Extent]:
    """The functions and classes of a module, each before those within it.

    A module that this Python cannot parse has none.
    """
    try:
        return tuple(_within(ast.parse(text), ""))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()


def _within(parent: ast.AST, prefix: str) -> Iterator[Extent]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            name = prefix + node.name
            function = not isinstance(node, ast.ClassDef)
            yield Extent(name, first, node.end_lineno or first, function)
            yield from _within(node, f"{name}.")
        elif isinstance(node, _BLOCKS):
            yield from _within(node, prefix)


def enclosing(text: bytes, line: int) -> str:
    """The name of the innermost definition around a line; empty at the top level."""
    line = min(line, text.count(b"\n") or 1)
    around = [extent for extent in extents(text) if extent.first <= line <= extent.last]
    return min(around, key=lambda extent: extent.last - extent.first).name if around else ""
