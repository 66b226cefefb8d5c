"""The definitions of a release: griffe's model of its modules, read when they are needed."""

from __future__ import annotations

import ast
import difflib
import logging
import re
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import griffe
from overlay.errors import Exit, OverlayError
from series.upstream import Upstream

#: Fates of a definition. A class's bases and fields are part of its signature.
SAME, BODY, SIGNATURE, MOVED, GONE, NEW = "same", "body", "signature", "moved", "gone", "new"

#: Why a definition is watched; the first two need a person if it has changed.
MIRRORED, SEAM, IMPORTED, MAKER, PATCHED = "mirrored", "seam", "imported", "maker", "patched file"
DECIDE = (MIRRORED, SEAM)

#: A statement that sets an attribute of an object's own, in the text of a method.
ASSIGNED = re.compile(r"self\.(\w+)(?:: [^=\n]+)? = ")

_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
_DOCUMENTED = (ast.Module, ast.ClassDef, *_FUNCTION)

logging.getLogger("griffe").setLevel(logging.CRITICAL)  # it warns of each duplicate definition

Object = griffe.Object


@dataclass(frozen=True)
class Change:
    """A watched definition that is not as it was.

    Attributes:
        kind: why it is watched.
        name: dotted, as the pinned release has it.
        fate: one of :data:`SAME` to :data:`NEW`.
        sides: the definition in the pinned release and in the one under review, as far as they
            have it.
        users: modules of ours below the package, and patches.
        detail: sentences on it; may be empty.
    """

    kind: str
    name: str
    fate: str
    sides: tuple[Object | None, Object | None]
    users: tuple[str, ...] = ()
    detail: str = ""

    @property
    def places(self) -> tuple[str | None, str | None]:
        """File and line on both sides; None if it is new or gone."""
        before, after = (f"{e.filepath}:{e.lineno or 1}" if e else None for e in self.sides)
        return before, after

    @property
    def diff(self) -> list[str]:
        """Lines of a unified diff; none for a module."""
        return unified(*(text_of(each) if each else "" for each in self.sides))


class Model:
    """The modules of one release.

    Args:
        upstream: the release's files.
    """

    def __init__(self, upstream: Upstream) -> None:
        self.paths = {module_name(path): path for path in upstream.paths}
        #: Texts by path.
        self.text = cache(lambda path: upstream.read(path).decode(errors="replace"))

    def module(self, name: str) -> Object | None:
        """Return a module by its dotted name, or None.

        Raises:
            OverlayError: it cannot be parsed.
        """
        path = self.paths.get(name)
        return parsed(path, self.text(path)) if path else None

    def find(self, dotted: str, seen: frozenset[str] = frozenset()) -> Object | None:
        """Return the definition that a dotted name leads to, through imports and base classes.

        Args:
            dotted: of a module, or of something in one.
            seen: names that led here.
        """
        place = self.place(dotted)
        if place is None or dotted in seen:
            return None
        found = self.module(place[0])
        assert found is not None
        left = place[1].split(".") if place[1] else []
        while left:
            member = found.members.get(left[0])
            if member is None:
                owners = [*bases(found), *_starred(found)]
                ways = (self.find(".".join([each, *left]), seen | {dotted}) for each in owners)
                return next(filter(None, ways), None)
            if isinstance(member, griffe.Alias):
                return self.find(".".join([member.target_path, *left[1:]]), seen | {dotted})
            found = member
            left = left[1:]
        return found

    def place(self, dotted: str) -> tuple[str, str] | None:
        """Split a dotted name into module and qualified name; None outside the release."""
        parts = dotted.split(".")
        for at in range(len(parts), 0, -1):
            if (module := ".".join(parts[:at])) in self.paths:
                return module, ".".join(parts[at:])
        return None

    def elsewhere(self, definition: Object, before: Model) -> Object | None:
        """Return the definition of the same name that only this release has in another module."""
        name = name_of(definition)
        head = name.partition(".")[0]
        wanted = re.compile(rf"^(?:class|(?:async )?def) {re.escape(head)}\b", re.MULTILINE)
        for module, path in self.paths.items():
            if head not in self.text(path) or not wanted.search(self.text(path)):
                continue
            if module in before.paths and wanted.search(before.text(before.paths[module])):
                continue
            if found := self.find(f"{module}.{name}"):
                return found
        return None


def module_name(path: str) -> str:
    """Return the dotted name of a module from its path."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@lru_cache(maxsize=2048)  # most modules are the same in two releases
def parsed(path: str, text: str) -> Object:
    """Return the model of one module.

    Raises:
        OverlayError: it cannot be parsed.
    """
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


# Parts of a definition


def name_of(definition: Object) -> str:
    """Return the qualified name of a definition in its module; empty for the module."""
    return definition.path.removeprefix(definition.module.path).removeprefix(".")


def text_of(definition: Object) -> str:
    """Return the lines of a definition, decorators included; empty for a module."""
    return "" if definition.is_module else "\n".join(definition.lines) + "\n"


def kind_of(definition: Object) -> str:
    """Return the kind of a definition, such as ``function`` or ``property``."""
    return "property" if "property" in definition.labels else definition.kind.value


def members(definition: Object) -> dict[str, Object]:
    """Return what a module or class defines, by name, without imported names."""
    found = definition.members.items()
    return {name: each for name, each in found if isinstance(each, Object) and each.lineno}


def bases(definition: Object) -> list[str]:
    """Return the dotted names of a class's bases."""
    listed = getattr(definition, "bases", ())
    return [each if isinstance(each, str) else each.canonical_path for each in listed]


def _starred(module: Object) -> list[str]:
    """Return the dotted names of the modules from which a module imports everything."""
    found = module.members.items()
    return [m.target_path for n, m in found if n.endswith("/*") and isinstance(m, griffe.Alias)]


# Comparison


def compare(before: Object | None, after: Object | None) -> str:
    """Return what became of a definition.

    Comments, docstrings and layout do not count.
    """
    if before is None or after is None:
        return NEW if before is None else GONE
    if kind_of(before) != kind_of(after) or _fields(before) != _fields(after):
        return SIGNATURE
    old, new = text_of(before), text_of(after)
    if old != new and not before.is_module:
        if shape(old, head=True) != shape(new, head=True):
            return SIGNATURE
        if shape(old) != shape(new):
            return BODY
    return SAME if before.path == after.path else MOVED


def _fields(definition: Object) -> list[str]:
    """Return the bases of a class, and its fields: names, types and values."""
    inner = members(definition).values() if definition.is_class else ()
    return bases(definition) + [
        f"{each.name}: {each.annotation} = {each.value}"
        for each in inner
        if isinstance(each, griffe.Attribute)
        and ("class-attribute" in each.labels or each.value is None)
    ]


@lru_cache(maxsize=16384)
def shape(text: str, head: bool = False) -> str:
    """Return a definition's syntax without comments, docstrings and layout.

    Args:
        text: of the definition.
        head: without the bodies of functions and classes, and the value of an attribute.
    """
    try:
        tree = ast.parse(f"if 1:\n{text}" if text[:1].isspace() else text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
        if head and isinstance(node, _FUNCTION):
            node.body, node.returns = [], None
        elif head and isinstance(node, ast.ClassDef):
            node.body, node.bases = [], []
    if head and isinstance(tree.body[0], ast.If):
        tree.body = tree.body[0].body
    if head and isinstance(tree.body[0], (ast.Assign, ast.AnnAssign)):
        return ast.dump(getattr(tree.body[0], "annotation", ast.Pass()))
    return ast.dump(tree)


def unified(before: str, after: str) -> list[str]:
    """Return the lines of a unified diff, without the names of files."""
    pair = before.splitlines(), after.splitlines()
    return list(difflib.unified_diff(*pair, lineterm="", n=3))[2:]
