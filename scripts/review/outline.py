"""Which functions and classes a module defines, and on which lines."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Extent:
    """A function or a class.

    Attributes:
        name: its qualified name, as ``Class.method``.
        first: its first line, that of its first decorator, from 1.
        last: its last line.
        function: whether it is a function.
    """

    name: str
    first: int
    last: int
    function: bool


def extents(text: str) -> list[Extent]:
    """The functions and classes of a module, those within others after them.

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


def around(found: list[Extent], line: int) -> str:
    """The name of the innermost definition that holds a line, or nothing."""
    holding = [each for each in found if each.first <= line <= each.last]
    return min(holding, key=lambda each: each.last - each.first).name if holding else ""


def bodies(text: str) -> Mapping[str, str]:
    """The text of each function, by qualified name; of several with one name, all."""
    lines = text.splitlines(keepends=True)
    found: dict[str, str] = {}
    for each in extents(text):
        if each.function:
            body = "".join(lines[each.first - 1 : each.last])
            found[each.name] = found.get(each.name, "") + body
    return found
