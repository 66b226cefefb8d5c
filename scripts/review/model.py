"""The definitions of a release: griffe's model of its modules, read when they are needed."""

from __future__ import annotations

import ast
import difflib
import logging
import re
from collections.abc import Iterator
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
class Definition:
    """A module, class, function or attribute of a release.

    Attributes:
        module: dotted name of its module.
        name: qualified name in the module; empty for the module.
        path: of its file.
        object: griffe's model.
        text: its lines, decorators included; empty for a module.
    """

    module: str
    name: str
    path: str
    object: Object
    text: str

    @property
    def full_name(self) -> str:
        """Dotted name."""
        return f"{self.module}.{self.name}".rstrip(".")

    @property
    def place(self) -> str:
        """File and line of its beginning."""
        return f"{self.path}:{self.object.lineno or 1}"

    @property
    def kind(self) -> str:
        """Kind of the definition, such as ``function`` or ``property``."""
        return "property" if "property" in self.object.labels else self.object.kind.value

    def members(self) -> Iterator[Definition]:
        """Yield what a module or class defines, without imported names."""
        for name in self.object.members:
            if member := self.member(name):
                yield member

    def member(self, name: str) -> Definition | None:
        """Return what a module or class defines under a name; None for an imported one."""
        member = self.object.members[name]
        if not isinstance(member, Object) or not member.lineno:
            return None
        lines = self.object.lines_collection[Path(self.path)][member.lineno - 1 : member.endlineno]
        text = "\n".join(lines) + "\n"
        return Definition(self.module, f"{self.name}.{name}".lstrip("."), self.path, member, text)


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
    sides: tuple[Definition | None, Definition | None]
    users: tuple[str, ...] = ()
    detail: str = ""

    @property
    def places(self) -> tuple[str | None, str | None]:
        """File and line on both sides; None if it is new or gone."""
        before, after = self.sides
        return before.place if before else None, after.place if after else None

    @property
    def diff(self) -> list[str]:
        """Lines of a unified diff; none for a module."""
        return unified(*(each.text if each else "" for each in self.sides))


class Model:
    """The modules of one release.

    Args:
        upstream: the release's files.
    """

    def __init__(self, upstream: Upstream) -> None:
        self.paths = {module_name(path): path for path in upstream.paths}
        #: Texts by path.
        self.text = cache(lambda path: upstream.read(path).decode(errors="replace"))

    def module(self, name: str) -> Definition | None:
        """Return a module by its dotted name, or None.

        Raises:
            OverlayError: it cannot be parsed.
        """
        path = self.paths.get(name)
        return parsed(path, self.text(path)) if path else None

    def find(
        self, module: str, name: str, seen: frozenset[tuple[str, str]] = frozenset()
    ) -> Definition | None:
        """Return the definition that a name leads to, through imports and base classes.

        Args:
            module: dotted.
            name: qualified; empty for the module.
            seen: names that led here.
        """
        found = self.module(module)
        if found is None or (module, name) in seen or not name:
            return found
        seen |= {(module, name)}
        parts = name.split(".")
        for at, part in enumerate(parts):
            rest = ".".join(parts[at + 1 :])
            member = found.object.members.get(part)
            if isinstance(member, griffe.Alias):
                return self._follow(member.target_path, rest, seen)
            if member is None:
                inner = f"{module}.{part}"
                if not found.name and inner in self.paths:  # a submodule that nothing imports
                    return self.find(inner, rest, seen)
                left = ".".join(parts[at:])
                owners = bases(found) if found.name else _starred(found)
                return next(filter(None, (self._follow(o, left, seen) for o in owners)), None)
            inside = found.member(part)
            assert inside is not None
            found = inside
        return found

    def _follow(
        self, target: str, rest: str, seen: frozenset[tuple[str, str]]
    ) -> Definition | None:
        place = self.place(f"{target}.{rest}".rstrip("."))
        return self.find(*place, seen) if place else None

    def place(self, dotted: str) -> tuple[str, str] | None:
        """Split a dotted name into module and qualified name; None outside the release."""
        parts = dotted.split(".")
        for at in range(len(parts), 0, -1):
            if (module := ".".join(parts[:at])) in self.paths:
                return module, ".".join(parts[at:])
        return None

    def elsewhere(self, definition: Definition, before: Model) -> Definition | None:
        """Return the definition of the same name that only this release has in another module."""
        head = definition.name.partition(".")[0]
        wanted = re.compile(rf"^(?:class|(?:async )?def) {re.escape(head)}\b", re.MULTILINE)
        for module, path in self.paths.items():
            if head not in self.text(path) or not wanted.search(self.text(path)):
                continue
            if module in before.paths and wanted.search(before.text(before.paths[module])):
                continue
            if found := self.find(module, definition.name):
                return found
        return None


def module_name(path: str) -> str:
    """Return the dotted name of a module from its path."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@lru_cache(maxsize=2048)  # most modules are the same in two releases
def parsed(path: str, text: str) -> Definition:
    """Return the model of one module.

    Raises:
        OverlayError: it cannot be parsed.
    """
    lines = griffe.LinesCollection()
    lines[Path(path)] = text.split("\n")
    name = module_name(path)
    try:
        module = griffe.visit(name, Path(path), text, lines_collection=lines)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise OverlayError(
            Exit.RELEASE,
            f"cannot be parsed: {error}",
            subject=path,
            next_step="review it with the Python that the release needs, if that is newer",
        ) from None
    return Definition(name, "", path, module, "")


def bases(definition: Definition) -> list[str]:
    """Return the dotted names of a class's bases."""
    listed = getattr(definition.object, "bases", ())
    return [each if isinstance(each, str) else each.canonical_path for each in listed]


def _starred(module: Definition) -> list[str]:
    """Return the dotted names of the modules from which a module imports everything."""
    found = module.object.members.items()
    return [m.target_path for n, m in found if n.endswith("/*") and isinstance(m, griffe.Alias)]


# Comparison


def compare(before: Definition | None, after: Definition | None) -> str:
    """Return what became of a definition.

    Comments, docstrings and layout do not count.
    """
    if before is None or after is None:
        return NEW if before is None else GONE
    if before.kind != after.kind or _fields(before) != _fields(after):
        return SIGNATURE
    if before.name and before.text != after.text:
        if shape(before.text, head=True) != shape(after.text, head=True):
            return SIGNATURE
        if shape(before.text) != shape(after.text):
            return BODY
    return SAME if before.full_name == after.full_name else MOVED


def _fields(definition: Definition) -> list[str]:
    """Return the bases of a class, and its fields: names, types and values."""
    members = definition.members() if definition.kind == "class" else ()
    fields = [each.object for each in members if isinstance(each.object, griffe.Attribute)]
    return bases(definition) + [
        f"{each.name}: {each.annotation} = {each.value}"
        for each in fields
        if "class-attribute" in each.labels or each.value is None
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
