"""Who makes, derives from, or replaces the classes and functions that hold a seam.

Only names are read: in each module, calls, bases, assignments and texts that lead to such a class
through the module's imports. The review reports differences and does not judge them.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from review.model import ASSIGNED, SAME, Definition, Model
from review.model import compare as compared

Place = tuple[str, str]
MAKES, DERIVES, REPLACES, NAMES = "makes", "derives from", "replaces", "names"
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Difference:
    """A definition that makes, derives from or replaces a class with a seam, and has changed.

    Attributes:
        name: dotted name of the class or function, or module.
        detail: a sentence.
        before: it in the pinned release, or None.
        after: it in the release, or None.
        classes: dotted names of the classes and functions with seams.
    """

    name: str
    detail: str
    before: Definition | None
    after: Definition | None
    classes: tuple[str, ...]


def compare(
    holders: Collection[Place], base: Model, release: Model, patched: Collection[str]
) -> Iterator[Difference]:
    """Yield the definitions around the classes with seams that differ.

    Args:
        holders: functions and classes with seams, by module and qualified name.
        base: the pinned release.
        release: the one under review.
        patched: paths of files that the patches change, which the watch list has whole.
    """
    targets = {(module, name.partition(".")[0]) for module, name in holders}
    methods = {name.rpartition(".")[2] for _, name in holders if "." in name}
    made = uses(targets, base)
    named = {
        (module, name.partition(".")[0])
        for (module, name), how in made.items()
        if MAKES in how and "." in name
    }
    # What a file says that is the same in both releases is no difference.
    there = set(release.paths.values())
    same = {p for p in base.paths.values() if p in there and base.text(p) == release.text(p)}
    every = targets | named | _derived(made)
    before, after = (uses(every, side, same) for side in (base, release))
    while more := _derived(after) - every:  # classes derived from a derived one
        every |= more
        before, after = (uses(every, side, same) for side in (base, release))
    for place in dict.fromkeys([*before, *after]):
        old, new = (side.get(place, {}) for side in (before, after))
        pair = tuple(
            side.find(*place) if place[0] in side.paths else None for side in (base, release)
        )
        if any(each is not None and each.path in patched for each in pair):
            continue
        classes = tuple(sorted({*old.values(), *new.values()}))
        name = ".".join(place).rstrip(".")
        if MAKES in old and pair[0] is not None:
            fate, detail = compared(pair[0], pair[1])
            if fate != SAME:
                detail = f"It {_how(old)}. {detail}".strip()
                yield Difference(name, detail, pair[0], pair[1], classes)
            yield from _setters(place, pair[0], (base, release), classes)
        elif old.keys() != new.keys():
            if new.keys() == {DERIVES} and not _overrides(pair[1], methods):
                continue
            text = f"It {_how(new)}" if new else f"It no longer {_how(old)}"
            yield Difference(name, f"{text}.", pair[0], pair[1], classes)


def _derived(made: Mapping[Place, Mapping[str, str]]) -> set[Place]:
    return {place for place, how in made.items() if DERIVES in how}


def _setters(
    place: Place, maker: Definition, sides: tuple[Model, Model], classes: tuple[str, ...]
) -> Iterator[Difference]:
    """Yield the other methods of a maker's class that set an attribute that it sets, if new."""
    attributes = set(ASSIGNED.findall(maker.text))
    owners = [side.find(place[0], place[1].rpartition(".")[0]) for side in sides]
    if not attributes or None in owners or "." not in place[1]:
        return
    before, after = ({each.name: each for each in owner.members()} for owner in owners if owner)
    for name, member in after.items():
        old = before.get(name)
        new = set(ASSIGNED.findall(member.text)) - set(ASSIGNED.findall(old.text if old else ""))
        if name != place[1] and member.kind == "function" and new & attributes:
            detail = f"It sets {', '.join(sorted(new & attributes))}, as {maker.name} does."
            yield Difference(member.full_name, detail, old, member, classes)


def uses(
    targets: Collection[Place], model: Model, without: Collection[str] = ()
) -> dict[Place, dict[str, str]]:
    """Return by definition how it uses the targets: a verb, and the target's dotted name.

    Args:
        targets: classes and functions, by module and name.
        model: of the release.
        without: paths of files that are not read.
    """
    found: dict[Place, dict[str, str]] = {}
    last = {part for place in targets for part in place}
    for module, path in model.paths.items():
        text = "" if path in without else model.text(path)
        if not any(name in text for name in last):
            continue
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError):
            continue
        resolve = _Names(module, tree, targets, model)
        for scope, verb, target in _mentions(tree, "", resolve):
            # Of a class that derives, and of a function within, the outermost one counts.
            place = ".".join(scope.split(".")[:2]) if verb == MAKES else scope.partition(".")[0]
            found.setdefault((module, place), {})[verb] = ".".join(target).rstrip(".")
    return found


class _Names:
    """What the names of one module lead to."""

    def __init__(
        self, module: str, tree: ast.Module, targets: Collection[Place], model: Model
    ) -> None:
        classes = (node.name for node in tree.body if isinstance(node, ast.ClassDef))
        self.imports = {name: f"{module}.{name}" for name in classes}
        self.targets, self.model, self.module = set(targets), model, module
        self.last = {name for _, name in targets}
        self.modules = {module for module, _ in targets}
        self.classes = {
            place for place in targets if (found := model.find(*place)) and found.kind == "class"
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    self.imports[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.asname:
                        self.imports[alias.asname] = alias.name

    def __call__(self, node: ast.AST) -> tuple[Place, str] | None:
        """Return the target that an expression leads to, and what follows it."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return self._target(node.value) if node.value.startswith("vllm.") else None
        if not isinstance(node, (ast.Name, ast.Attribute)):
            return None
        head, _, rest = ast.unparse(node).partition(".")
        return self._target(f"{self.imports.get(head, head)}.{rest}".rstrip("."))

    def _target(self, dotted: str) -> tuple[Place, str] | None:
        if dotted in self.modules:
            return (dotted, ""), ""
        place = self.model.place(dotted)
        if place is None or not place[1]:
            return None
        head, _, rest = place[1].partition(".")
        if head not in self.last:
            return None
        if (place[0], head) in self.targets:
            return (place[0], head), rest
        found = self.model.find(place[0], head)
        if found is not None and (found.module, found.name) in self.targets:
            return (found.module, found.name), rest
        return None


def _mentions(node: ast.AST, scope: str, resolve: _Names) -> Iterator[tuple[str, str, Place]]:
    """Yield scope, verb and target of each use below a node."""
    for child in ast.iter_child_nodes(node):
        inner = f"{scope}.{child.name}".lstrip(".") if isinstance(child, _SCOPES) else scope
        for verb, expression in _candidates(child):
            found = resolve(expression)
            made = verb != MAKES or (found and found[0] in resolve.classes and not found[1])
            if found and made:
                yield inner, verb, found[0]
        yield from _mentions(child, inner, resolve)


def _candidates(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield the expressions of one node that may lead to a target, each with a verb."""
    if isinstance(node, ast.ClassDef):
        yield from ((DERIVES, base) for base in node.bases)
    elif isinstance(node, ast.Call):
        sets = isinstance(node.func, ast.Name) and node.func.id == "setattr" and node.args
        yield (REPLACES, node.args[0]) if sets else (MAKES, node.func)
    elif isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from ((REPLACES, each) for each in targets if isinstance(each, ast.Attribute))
    elif isinstance(node, ast.Constant):
        yield NAMES, node


def _overrides(found: Definition | None, methods: Collection[str]) -> bool:
    """Return whether a derived class has a method with a seam, or a base that may have one."""
    if found is None or not found.name or found.kind != "class":
        return True
    bases = getattr(found.object, "bases", ())
    return len(bases) > 1 or any(m.name.rpartition(".")[2] in methods for m in found.members())


def _how(how: Mapping[str, str]) -> str:
    return ", and ".join(f"{verb} {target}" for verb, target in sorted(how.items()))
