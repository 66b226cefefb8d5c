"""The functions and classes of a module, and their lines."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

#: What statements are in: a function within an expression has no name.
_BLOCKS = (ast.stmt, ast.excepthandler, ast.match_case)


class Extent(NamedTuple):
    """The lines of a function or a class.

    Attributes:
        name: its qualified name, as ``Class.method``.
        first: its first line, that of its first decorator, one-based.
        last: its last line.
    """

    name: str
    first: int
    last: int


@lru_cache(maxsize=512)
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
            yield Extent(name, first, node.end_lineno or first)
            yield from _within(node, f"{name}.")
        elif isinstance(node, _BLOCKS):
            yield from _within(node, prefix)


def enclosing(text: bytes, line: int) -> str:
    """The name of the innermost definition around a line; empty at the top level."""
    line = min(line, text.count(b"\n") or 1)
    around = [extent for extent in extents(text) if extent.first <= line <= extent.last]
    return min(around, key=lambda extent: extent.last - extent.first).name if around else ""
