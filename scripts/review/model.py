"""The definitions of a release: griffe's model of its modules, read when they are needed."""

from __future__ import annotations

import ast
import difflib
import logging
import textwrap
from functools import cache, lru_cache
from pathlib import Path

import griffe
from overlay.errors import Exit, OverlayError
from series.upstream import Upstream

_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
_DOCUMENTED = (ast.Module, ast.ClassDef, *_FUNCTION)

logging.getLogger("griffe").setLevel(logging.CRITICAL)  # it warns of each duplicate definition

Object = griffe.Object


class Model:
    """The modules of one release.

    Args:
        upstream: the release's files.
    """

    def __init__(self, upstream: Upstream) -> None:
        self.paths = {module_name(path): path for path in upstream.paths}
        #: Texts by path.
        self.text = cache(lambda path: upstream.read(path).decode(errors="replace"))

    def find(self, dotted: str, seen: frozenset[str] = frozenset()) -> Object | None:
        """Return the definition that a dotted name leads to, through imports and base classes.

        Args:
            dotted: of a module, or of something in one.
            seen: names that led here.

        Raises:
            OverlayError: a module on the way cannot be parsed.
        """
        parts = dotted.split(".")
        ends = range(len(parts), 0, -1)
        end = next((n for n in ends if ".".join(parts[:n]) in self.paths), None)
        if end is None or dotted in seen:
            return None
        path = self.paths[".".join(parts[:end])]
        owner, seen = _parsed(path, self.text(path)), seen | {dotted}
        for place in range(end, len(parts)):
            member, left = owner.members.get(parts[place]), parts[place + 1 :]
            if member is None:
                starred = (m for n, m in owner.members.items() if n.endswith("/*"))
                owners = [*bases(owner), *(getattr(each, "target_path", "") for each in starred)]
                ways = (self.find(".".join([each, *parts[place:]]), seen) for each in owners)
                return next(filter(None, ways), None)
            if isinstance(member, griffe.Alias):
                return self.find(".".join([member.target_path, *left]), seen)
            owner = member
        return owner

    def members(self, found: Object) -> dict[str, Object]:
        """Return what a class defines and inherits, by name, without imported names."""
        inherited: dict[str, Object] = {}
        for dotted in bases(found):
            if base := self.find(dotted):
                inherited = self.members(base) | inherited
        own = {n: m for n, m in found.members.items() if isinstance(m, Object) and m.lineno}
        return inherited | own


def module_name(path: str) -> str:
    """Return the dotted name of a module from its path."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@lru_cache(maxsize=2048)  # most modules are the same in two releases
def _parsed(path: str, text: str) -> Object:
    lines = griffe.LinesCollection()
    lines[Path(path)] = text.split("\n")
    try:
        return griffe.visit(module_name(path), Path(path), text, lines_collection=lines)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise OverlayError(
            Exit.RELEASE,
            f"cannot be parsed: {error}",
            subject=path,
            next_step="review it with the Python that the release needs, if that is newer",
        ) from None


def bases(definition: Object) -> list[str]:
    """Return the dotted names of a class's bases."""
    listed = getattr(definition, "bases", ())
    return [each if isinstance(each, str) else each.canonical_path for each in listed]


def text_of(definition: Object | None) -> str:
    """Return the lines of a definition, decorators included; empty for a module or None."""
    if definition is None or definition.is_module:
        return ""
    return "\n".join(definition.lines) + "\n"


@lru_cache(maxsize=16384)
def shape(text: str, head: bool = False) -> str:
    """Return a definition's syntax without comments, docstrings and layout.

    Args:
        text: of the definition.
        head: without the functions and classes within it.
    """
    try:
        tree = ast.parse(textwrap.dedent(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    outer = tree.body[0] if tree.body else None
    if head and isinstance(outer, ast.ClassDef):
        outer.body = [each for each in outer.body if not isinstance(each, _DOCUMENTED)]
    return ast.dump(tree)


def unified(before: str, after: str) -> list[str]:
    """Return the lines of a unified diff, without the names of files."""
    pair = before.splitlines(), after.splitlines()
    return list(difflib.unified_diff(*pair, lineterm="", n=3))[2:]
