"""The features and fixes that each of our modules serves.

It is read from our sources: what a module asks of ``features.X``, which of our modules the live
batch makes where ``features.X`` is on. A module that asks nothing serves those that import it.
"""

from __future__ import annotations

import ast
import runpy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from overlay.pin import PACKAGE

Words = frozenset[str]
NONE: Words = frozenset()

#: The modules through which the seams reach others: each of their verbs serves words of its own.
DOORS = ("live", "fixes")
#: Modules that serve no word: the switch itself, the log line and the probe.
FRAME = (
    "features",
    "switch",
    "startup",
    "identity",
    "version",
    "ranks",
    "replaced",
    "sync_guard",
    "probe",
)

#: Modules that those of most words share.
HELPERS = ("feature", "fences", "subclasses")

OURS = PACKAGE.replace("/", ".")


@dataclass
class Module:
    """One of our modules.

    Attributes:
        tree: the parsed file.
        names: imported name to our module and the name in it, or nothing.
    """

    tree: ast.Module
    names: dict[str, tuple[str, str]] = field(default_factory=dict)


class Vocabulary:
    """Which words our code serves.

    Args:
        folder: ``vendor_overlay`` of the overlay.

    Attributes:
        features: the words of features.
        fixes: the words of fixes.
        needs: word to those that it builds on.
    """

    def __init__(self, folder: Path) -> None:
        file = folder / PACKAGE / "features.py"
        told = runpy.run_path(str(file)) if file.is_file() else {}
        self.features: Words = frozenset(told.get("FEATURES", ()))
        self.fixes: Words = frozenset(told.get("FIXES", ()))
        self.needs: dict[str, Words] = dict(told.get("NEEDS", {}))
        self._constants = {n: v for n, v in told.items() if isinstance(v, str) and v in self.all}
        self._modules = dict(_modules(folder / PACKAGE))
        self._own = {n: self._mentioned(m.tree) for n, m in self._modules.items()}
        for name in [*DOORS, *(n for n in self._own if n.partition(".")[0] in FRAME)]:
            self._own[name] = NONE
        #: Attribute of the live batch to the words that it serves.
        self._attributes: dict[str, Words] = {}
        self._verbs = {name: node for door in DOORS for name, node in self._functions(door)}
        for door in DOORS:
            for name, node in self._functions(door):
                if name == "__init__":
                    self._read_constructor(door, node.body, NONE, {})
        for door in DOORS:
            for name, node in self._functions(door):
                if name not in ("__init__", "attach", "of"):
                    self._read_verb(door, name, node)

    @property
    def all(self) -> Words:
        """Every word."""
        return self.features | self.fixes

    def of_module(self, name: str) -> Words:
        """The words that a module serves, by its name below ``readiness``, or by its path."""
        name = short(name)
        if name.partition(".")[0] in (*DOORS, *FRAME, *HELPERS):
            return NONE
        seen, new, words = {name}, [name], NONE
        while new:
            each = new.pop()
            if own := self._own.get(each, NONE):
                words |= own
                continue
            for user, module in self._modules.items():
                imports = {origin for origin, _ in module.names.values()}
                if each in imports and user not in seen and user not in DOORS:
                    seen.add(user)
                    new.append(user)
        return words

    def asked(self, name: str) -> Words:
        """The words that a module asks for itself, or that it is made for."""
        return self._own.get(name, NONE)

    def at(self, path: str, line: int) -> Words:
        """The words that a line of one of our modules serves."""
        name = short(path)
        if name in DOORS:
            for verb, node in self._functions(name):
                if node.lineno <= line <= (node.end_lineno or node.lineno):
                    if verb == "__init__":
                        return self._of_statement(node.body, line) or self.all_attached
                    return self.of_verb(verb)
        return self.of_module(name)

    def _of_statement(self, body: Iterable[ast.stmt], line: int) -> Words:
        """The words of the innermost statement at a line, or else of the test that it is under."""
        for statement in body:
            if statement.lineno <= line <= (statement.end_lineno or 0):
                if not isinstance(statement, ast.If):
                    return self._used(statement)
                inner = self._of_statement((*statement.body, *statement.orelse), line)
                return inner or self._mentioned(statement.test)
        return NONE

    @property
    def all_attached(self) -> Words:
        """The words of everything that the live batch holds or calls."""
        called = (self._own.get(o, NONE) for d in DOORS for o in self._imported(d))
        return frozenset().union(*self._attributes.values(), *called)

    def of_verb(self, verb: str, seen: tuple[str, ...] = ()) -> Words:
        """The words that a verb, or an attribute, of the live batch serves."""
        if verb == "attach":
            return self.all_attached
        if verb in seen or verb == "of":
            return NONE
        if (node := self._verbs.get(verb)) is None:
            return self._attributes.get(verb, NONE)
        return self._used(node, (*seen, verb))

    # Our modules

    def _functions(self, name: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        tree = self._modules[name].tree if name in self._modules else ast.Module([], [])
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                yield node.name, node

    def _imported(self, name: str) -> set[str]:
        module = self._modules.get(name)
        return {origin for origin, _ in module.names.values()} if module else set()

    def _mentioned(self, node: ast.AST) -> Words:
        """The words whose constants a node names, as ``features.X``."""
        return frozenset(
            str(self._constants[each.attr])
            for each in ast.walk(node)
            if isinstance(each, ast.Attribute)
            and isinstance(each.value, ast.Name)
            and each.value.id == "features"
            and each.attr in self._constants
        )

    def _read_constructor(
        self, door: str, body: Iterable[ast.stmt], under: Words, known: dict[str, Words]
    ) -> None:
        """Read which words the attributes serve, and the modules that they are made of."""
        for statement in body:
            if isinstance(statement, ast.If):
                words = self._mentioned(statement.test) or under
                self._read_constructor(door, statement.body, words, known)
                self._read_constructor(door, statement.orelse, under, known)
                continue
            value = getattr(statement, "value", None)
            if value is None:
                continue
            local = [known.get(n.id, NONE) for n in ast.walk(value) if isinstance(n, ast.Name)]
            held = [self._held(node) for node in ast.walk(value)]
            words = self._mentioned(value) or under or frozenset().union(*local, *held)
            for node in ast.walk(value):
                origin = self._origin(door, node)
                if origin is not None and words and not self._own.get(origin):
                    self._own[origin] = words
                elif origin is not None:
                    words = words or self._own.get(origin, NONE)
            targets = statement.targets if isinstance(statement, ast.Assign) else []
            targets = targets or [t for t in [getattr(statement, "target", None)] if t]
            for target in targets:
                if isinstance(target, ast.Name):
                    known[target.id] = known.get(target.id, NONE) | words
                elif isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    self._attributes[target.attr] = self._held(target) | words

    def _read_verb(self, door: str, name: str, node: ast.FunctionDef) -> None:
        """Read which words the modules serve that only a verb calls."""
        for statement in ast.walk(node):
            if isinstance(statement, ast.Assign) and isinstance(
                statement.targets[0], ast.Attribute
            ):
                target = statement.targets[0]
                words = self._used(statement.value, (name,))
                if ast.unparse(target.value) == "self" and not self._attributes.get(target.attr):
                    self._attributes[target.attr] = words
                self._give(door, statement, words)
        if "_features" in ast.unparse(node):
            return
        self._give(door, node, self._used(node, (name,)))

    def _give(self, door: str, node: ast.AST, words: Words) -> None:
        """Let the modules that a node names serve these words, if they ask for none."""
        for each in ast.walk(node):
            origin = self._origin(door, each)
            if origin is not None and not self._own.get(origin):
                self._own[origin] = words

    def _origin(self, module: str, node: ast.AST) -> str | None:
        """Our module that a name leads to, if it may serve a word."""
        if not isinstance(node, ast.Name) or module not in self._modules:
            return None
        origin = self._modules[module].names.get(node.id, ("", ""))[0]
        framed = origin in DOORS or origin.partition(".")[0] in (*FRAME, *HELPERS)
        return None if framed or not origin else origin

    def _held(self, node: ast.AST) -> Words:
        """The words of what an attribute of the live batch holds."""
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            return self._attributes.get(node.attr, NONE)
        return NONE

    def _used(self, node: ast.AST, seen: tuple[str, ...] = ()) -> Words:
        """The words that a function or statement of a door serves.

        Args:
            node: the function or statement.
            seen: the verbs that lead to it.
        """
        words = self._mentioned(node)
        for each in ast.walk(node):
            for door in DOORS:
                if (origin := self._origin(door, each)) is not None:
                    words |= self._own.get(origin, NONE)
            if not isinstance(each, ast.Attribute) or ast.unparse(each.value) != "self":
                continue
            if each.attr in ("_features", "_verbs"):
                words |= self._followers(seen[-1]) if seen else NONE
            elif each.attr in self._verbs:
                words |= self.of_verb(each.attr, seen)
            else:
                words |= self._held(each)
        return words

    def _followers(self, verb: str) -> Words:
        """The words of the features that follow a batch and have a verb of their own."""
        words = NONE
        for door in DOORS:
            for origin, name in self._modules[door].names.values():
                if name and any(verb == n for n, _ in self._functions(origin)):
                    words |= self.of_module(origin) if origin != "feature" else NONE
        return words


def _modules(folder: Path) -> Iterator[tuple[str, Module]]:
    for file in sorted(folder.rglob("*.py")):
        module = Module(ast.parse(file.read_bytes()))
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(OURS):
                continue
            inner = (node.module or "").removeprefix(OURS).lstrip(".")
            for alias in node.names:
                below = folder / inner.replace(".", "/") / f"{alias.name}.py"
                name = f"{inner}.{alias.name}".lstrip(".")
                is_module = below.is_file() or (below.parent / alias.name).is_dir()
                origin = (name, "") if is_module else (inner, alias.name)
                module.names[alias.asname or alias.name] = origin
        yield short(file.relative_to(folder.parents[2]).as_posix()), module


def short(name: str) -> str:
    """The name of one of our modules below the package, from its path or its dotted name."""
    dotted = name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    return dotted.removeprefix(OURS).lstrip(".")
