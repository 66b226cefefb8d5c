"""Statements that put something else in place of what holds a seam, while vLLM runs.

They are assignments to an attribute of a class, an object or a module, ``setattr``, entries of
``sys.modules``, and a second definition of the same name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from review.definitions import FUNCTION, Module
from review.references import Place, References

#: What is replaced, by which function, how, and where.
Replacement = tuple[Place, Place, str, str]


def replacements(code: References, seams: Sequence[Place]) -> Iterator[Replacement]:
    """Every statement of a release that replaces a definition with a seam, or its class.

    Args:
        code: of the release.
        seams: the definitions that hold one.
    """
    targets = {*seams, *((module, name.partition(".")[0]) for module, name in seams)}
    # An assignment, with or without an annotation, or one by name.
    last = "|".join(map(re.escape, sorted({name.rpartition(".")[2] for _, name in targets})))
    text = rf"\.(?:{last})\s*(?::[^=\n]+)?=(?!=)|\bsetattr\(|\bsys\.modules\["
    for module in code.matching(re.compile(text.encode())):
        yield from _Assignments(code, module, targets).found()
    for place in sorted(targets):
        yield from _redefined(code, place)


class _Assignments:
    """The assignments of one module to attributes that have the name of a seam's function."""

    def __init__(self, code: References, module: Module, targets: set[Place]) -> None:
        self.code, self.module, self.targets = code, module, targets
        self.modules = {name for name, _ in targets}
        self.lasts = {name.rpartition(".")[2] for _, name in targets}

    def found(self) -> Iterator[Replacement]:
        yield from self._in(self.module.tree, "", None)

    def _in(self, node: ast.AST, holder: str, function: ast.AST | None) -> Iterator[Replacement]:
        for child in ast.iter_child_nodes(node):
            name, inside = holder, function
            if isinstance(child, (ast.ClassDef, *FUNCTION)):
                name = f"{holder}.{child.name}".lstrip(".") if function is None else holder
                if not isinstance(child, ast.ClassDef):
                    inside = function or child
            for owner, attribute in _set_attributes(child):
                if attribute in self.lasts:
                    how = f"{ast.unparse(owner)}.{attribute}"
                    for place in self._meant(owner, attribute, name, inside):
                        yield self._at(place, name, how, child)
                elif ast.unparse(owner) == "sys.modules" and attribute in self.modules:
                    yield self._at((attribute, ""), name, f"sys.modules[{attribute!r}]", child)
            yield from self._in(child, name, inside)

    def _at(self, place: Place, holder: str, how: str, node: ast.AST) -> Replacement:
        line = getattr(node, "lineno", 1)
        return place, (self.module.name, holder), how, f"{self.module.path}:{line}"

    def _meant(
        self, owner: ast.expr, name: str, holder: str, function: ast.AST | None
    ) -> set[Place]:
        """The definitions with seams that an attribute of an object may be."""
        text = ast.unparse(owner)
        scope = self.code.scope(self.module, function)
        known: list[Place] = []
        if text in ("self", "cls"):
            known = [(self.module.name, holder.rpartition(".")[0])]
        else:
            for origin in scope.origins(text):
                definition = self.code.find(origin)
                if definition is not None and definition.kind in ("module", "class"):
                    known.append((definition.module, definition.name))
        if known or text in ("self", "cls"):
            # An attribute of a class hides the method of its base, and an object's hides both.
            order = [each for place in known for each in (place, *self.code.order(place))]
            return {(m, f"{q}.{name}".lstrip(".")) for m, q in order} & self.targets
        # Of other objects the class is not known; most are called as their class is.
        called = text.rpartition(".")[2].lstrip("_").lower()
        return {
            place
            for place in self.targets
            if place[1].endswith(f".{name}")
            and f"_{_snake(place[1].partition('.')[0])}".endswith(f"_{called}")
        }


def _redefined(code: References, place: Place) -> Iterator[Replacement]:
    """A name that its own module or class defines a second time, or imports after that."""
    definition = code.find(place)
    module = code.definitions.module(place[0])
    if definition is None or module is None or (definition.module, definition.name) != place:
        return
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in definition.nodes[1:]:
        how = "assigned" if not isinstance(node, kinds) else "defined again"
        yield place, (place[0], ""), how, f"{module.path}:{getattr(node, 'lineno', 1)}"
    if place[1] in module.imports:
        yield place, (place[0], ""), "imported as well", f"{module.path}:1"


def _set_attributes(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """The objects and attributes that a statement or call sets; also the keys of a mapping."""
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in (each for whole in targets for each in ast.walk(whole)):
            if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store):
                yield target.value, target.attr
            elif isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
                yield target.value, str(target.slice.value)
    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr":
        if len(node.args) == 3 and isinstance(node.args[1], ast.Constant):
            yield node.args[0], str(node.args[1].value)


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
