"""Syntax trees compared, and the texts that they were parsed from.

Nothing here recurses: an expression may be nested deeper than Python's own stack.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence

from overlay.patches import split_lines
from series import git

from review.definitions import FUNCTION, Definition, Definitions

#: What two nodes may differ in and mean the same: the ``u`` of a string, and a type comment.
_IGNORED = ("kind", "type_comment")
#: Methods by which the text of a log message gets into a log.
_LOGGED = ("debug", "info", "warning", "error", "exception", "critical")
_LOGGED_ONCE = tuple(f"{name}_once" for name in _LOGGED)
_HEADER = 4
_HUNK = re.compile(r"^@@ -(\d+)((?:,\d+)?) \+(\d+)", re.MULTILINE)

#: A tree as a flat sequence: types of nodes, lengths of lists, and constants with their types.
Shape = tuple[object, ...]


def shape(*nodes: ast.AST, quiet: bool = False) -> Shape:
    """Everything that nodes mean: their trees without positions.

    Args:
        nodes: from a tree without docstrings.
        quiet: whether to leave out the texts that are written to a log.
    """
    parts: list[object] = []
    left: list[object] = list(reversed(nodes))
    while left:
        part = left.pop()
        if isinstance(part, list):
            part = [each for each in part if not is_idle(each)]
            parts.append(len(part))
            left += reversed(part)
        elif isinstance(part, ast.AST):
            parts.append(type(part))
            values = [value for name, value in ast.iter_fields(part) if name not in _IGNORED]
            if quiet and isinstance(part, ast.Call) and _logs(part):
                values = [part.func, part.args[1:], part.keywords]
            left += reversed(values)
        else:
            parts.append((type(part), part))  # 1 and True and 1.0 are equal
    return tuple(parts)


def is_idle(part: object) -> bool:
    """Whether a statement does nothing: ``pass``, or a text that documents an attribute."""
    if isinstance(part, ast.Expr):
        return isinstance(part.value, ast.Constant) and isinstance(part.value.value, str)
    return isinstance(part, ast.Pass)


def definition_shape(definition: Definition) -> Shape:
    """The shape of all nodes of a definition."""
    return shape(*definition.nodes)


def lines_of(data: bytes, nodes: Iterable[ast.AST]) -> bytes:
    """The lines that statements were parsed from, with their decorators."""
    lines = split_lines(data)
    return b"".join(
        line if line.endswith(b"\n") else line + b"\n"
        for node in nodes
        for line in lines[first_line(node) - 1 : int(getattr(node, "end_lineno", 0))]
    )


def first_line(node: ast.AST) -> int:
    """The one-based line of a statement, or of its first decorator."""
    lines = [int(getattr(node, "lineno", 1))]
    if isinstance(node, (ast.ClassDef, *FUNCTION)):
        lines += (decorator.lineno for decorator in node.decorator_list)
    return min(lines)


def text_of(definitions: Definitions, definition: Definition | None, whole: bool = True) -> bytes:
    """The text of a definition; nothing if there is none, or if it is a module.

    Args:
        definitions: of the release.
        definition: one of its definitions.
        whole: False to leave out a class's methods, and what stands between them.
    """
    if definition is None:
        return b""
    text = definitions.text(definition.path)
    parts = definition.nodes if whole else map(_head, definition.nodes)
    return lines_of(text, parts)


def unified(
    before: bytes,
    after: bytes,
    nodes: tuple[Sequence[ast.AST], Sequence[ast.AST]] = ((), ()),
) -> str:
    """A unified diff of two texts, without the names of files; empty if they are equal.

    Args:
        before: a text.
        after: another one.
        nodes: the statements that each text begins with, so that the headers of hunks have the
            lines of their files; without them, those of the texts.

    Raises:
        OverlayError: git is not there, or fails.
    """
    if before == after:
        return ""
    # git takes no longer if many lines are alike.
    options = ["--no-index", "--text", "--no-color", "--diff-algorithm=myers", "-U3"]
    files = {"before": before, "after": after}
    text = git.run(["diff", *options, "--", *files], files, most=1)[0].decode(errors="replace")
    numbers = tuple(map(_numbers, nodes))

    def placed(header: re.Match[str]) -> str:
        old, rest, new = header.groups()
        old, new = (
            str(of[int(at) - 1]) if 0 < int(at) <= len(of) else at
            for at, of in zip((old, new), numbers, strict=True)
        )
        return f"@@ -{old}{rest} +{new}"

    # Of "diff", "index", "---" and "+++" a reader learns nothing.
    return _HUNK.sub(placed, "\n".join(text.split("\n")[_HEADER:]))


def _numbers(nodes: Iterable[ast.AST]) -> list[int]:
    """The lines of statements in their file."""
    ends = ((node, int(getattr(node, "end_lineno", 0))) for node in nodes)
    return [line for node, end in ends for line in range(first_line(node), end + 1)]


def _head(node: ast.AST) -> ast.AST:
    """A class without what follows its first method; another statement as it is."""
    if not isinstance(node, ast.ClassDef):
        return node
    first = next((each for each in node.body if isinstance(each, FUNCTION)), None)
    if first is None:
        return node
    head = ast.ClassDef(node.name, node.bases, node.keywords, [], node.decorator_list)
    head.lineno, head.end_lineno = node.lineno, first_line(first) - 1
    return head


def _logs(call: ast.Call) -> bool:
    """Whether a call writes a fixed text to a module's log."""
    function = call.func
    return (
        isinstance(function, ast.Attribute)
        and function.attr in (*_LOGGED, *_LOGGED_ONCE)
        and isinstance(function.value, ast.Name)
        and function.value.id == "logger"
        and bool(call.args)
        and isinstance(call.args[0], ast.Constant)
    )
