"""References of a release's code to its own definitions, and the order of its classes.

They are found by parsing. Annotations are no references, and neither are tests of a type:
nothing is made by them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

from series.upstream import Upstream

from review.definitions import FUNCTION, Definition, Definitions, Module, imported

#: A definition: its dotted module, and its qualified name there.
Place = tuple[str, str]
#: The tests that a statement is under, each with whether it holds there.
Conditions = tuple[tuple[str, bool], ...]

_DOTTED = re.compile(r"vllm(\.\w+)+")
#: Functions to which a class is passed without being made.
_TESTS = ("isinstance", "issubclass", "cast", "hasattr", "getattr")
_WITHOUT_INSTANCE = ("classmethod", "staticmethod")


@dataclass(frozen=True)
class Reference:
    """One place where code names a definition.

    Attributes:
        place: of the definition.
        module: dotted, where the reference is.
        holder: the outermost function around it, or the class; empty for the module.
        path: the file.
        line: one-based.
        role: the target to which the value goes (``self.sampler``), ``return``, or nothing.
        conditions: those that it is under, within the function.
    """

    place: Place
    module: str
    holder: str
    path: str
    line: int
    role: str
    conditions: Conditions

    @property
    def owner(self) -> Place:
        """The top-level definition around the reference."""
        return self.module, self.holder.partition(".")[0]

    @property
    def where(self) -> str:
        """Path and line."""
        return f"{self.path}:{self.line}"


class Scope:
    """The names that one function, or a module outside its functions, can see.

    Args:
        module: that it is in.
        nodes: all of its nodes.
        outer: the scope around it.
    """

    def __init__(self, module: Module, nodes: Iterable[ast.AST], outer: Scope | None) -> None:
        self.module = module
        names: dict[str, list[Place]] = {}
        for node in nodes:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                for name, origin in imported(node, module).items():
                    names.setdefault(name, []).append(origin)
        # A function's own imports hide the module's.
        self._imports: dict[str, list[Place]] = {**(outer._imports if outer else {}), **names}

    def origins(self, text: str) -> Iterator[Place]:
        """The places that a dotted text may mean: where the name is found first, and there."""
        root, _, rest = text.partition(".")
        for origin, original in self._imports.get(root, ()):
            yield origin, ".".join(filter(None, (original, rest)))
        if root in self.module.definitions or root not in self._imports:
            yield self.module.name, text


class References:
    """All references of one release; a module is read if it mentions a name that is asked for."""

    def __init__(self, upstream: Upstream) -> None:
        self.definitions = Definitions.of(upstream)
        self._paths = upstream.paths
        self._read = upstream.read
        self._mentions: dict[str, list[str]] = {}
        self._scopes: dict[tuple[str, int], Scope] = {}

    @classmethod
    def of(cls, upstream: Upstream) -> References:
        """Those of a release, read once for as long as somebody holds ``upstream``."""
        if upstream not in _KNOWN:
            _KNOWN[upstream] = cls(upstream)
        return _KNOWN[upstream]

    def find(self, place: Place) -> Definition | None:
        """The definition that a place leads to."""
        return self.definitions.find(*place)

    def mentioning(self, name: str) -> list[Module]:
        """The modules in which an unqualified name occurs."""
        if name not in self._mentions:
            word = re.compile(rb"\b%s\b" % re.escape(name.encode()))
            # Most files do not hold the letters at all, and that is found sooner.
            self._mentions[name] = [
                module
                for module, text in self._texts.items()
                if name.encode() in text and word.search(text)
            ]
        modules = (self.definitions.module(module) for module in self._mentions[name])
        return [module for module in modules if module is not None]

    @cached_property
    def _texts(self) -> dict[str, bytes]:
        return {name: self._read(path) for name, path in self.definitions.paths.items()}

    def matching(self, pattern: re.Pattern[bytes]) -> list[Module]:
        """The modules in whose text a pattern occurs."""
        names = [name for name, text in self._texts.items() if pattern.search(text)]
        return [m for m in map(self.definitions.module, names) if m is not None]

    def scope(self, module: Module, function: ast.AST | None) -> Scope:
        """The names that a function of a module can see."""
        key = module.name, id(function)
        if key not in self._scopes:
            if function is None:
                scope = Scope(module, _outside_functions(module.tree), None)
            else:
                scope = Scope(module, ast.walk(function), self.scope(module, None))
            self._scopes[key] = scope
        return self._scopes[key]

    def resolve(self, scope: Scope, text: str) -> Iterator[Place]:
        """The definitions that a dotted text means in a scope."""
        for module, name in scope.origins(text):
            definition = self.definitions.find(module, name) if name else None
            if definition is not None:
                yield definition.module, definition.name

    def to(self, places: Iterable[Place]) -> Iterator[Reference]:
        """Every reference to one of these top-level definitions, in code or in a string.

        A call of a class's own constructor (``Batch.from_request()``) is one to the class.
        """
        wanted = {(d.module, d.name) for d in map(self.find, places) if d is not None}
        modules: dict[str, tuple[Module, set[str]]] = {}
        for _, name in wanted:
            for module in self.mentioning(name):
                modules.setdefault(module.name, (module, set()))[1].add(name)
        for module, names in modules.values():
            for node, holder, function, role, conditions in _expressions(module.tree):
                for place in map(self._made, self._named(module, node, function, names)):
                    if place in wanted and place != (module.name, holder.partition(".")[0]):
                        line = node.lineno
                        yield Reference(
                            place, module.name, holder, module.path, line, role, conditions
                        )

    def _made(self, place: Place) -> Place:
        """The class of a method that needs no instance; any other place itself."""
        definition = self.find(place) if "." in place[1] else None
        for node in definition.nodes if definition else ():
            for decorator in node.decorator_list if isinstance(node, FUNCTION) else ():
                if isinstance(decorator, ast.Name) and decorator.id in _WITHOUT_INSTANCE:
                    return place[0], place[1].rpartition(".")[0]
        return place

    def _named(
        self, module: Module, node: ast.expr, function: ast.AST | None, names: set[str]
    ) -> Iterator[Place]:
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str) and _DOTTED.fullmatch(node.value):
                outer, _, last = node.value.rpartition(".")
                if last in names:
                    definition = self.definitions.find(outer, last)
                    if definition is not None:
                        yield definition.module, definition.name
            return
        text = node.id if isinstance(node, ast.Name) else ast.unparse(node)
        scope = self.scope(module, function)
        if any(names.intersection(name.split(".")) for _, name in scope.origins(text)):
            yield from self.resolve(scope, text)

    # Classes

    def bases(self, place: Place) -> list[Place]:
        """The direct base classes that the release defines."""
        definition, module = self.find(place), self.definitions.module(place[0])
        bases: list[Place] = []
        for node in definition.nodes if definition and module else ():
            if isinstance(node, ast.ClassDef) and module is not None:
                bases += self.bases_of_node(module, node)
        return [base for base in dict.fromkeys(bases) if base != place]

    def bases_of_node(self, module: Module, node: ast.ClassDef) -> Iterator[Place]:
        """The same for the statement of a class, which may be within a function."""
        for base in node.bases:
            name = base.value if isinstance(base, ast.Subscript) else base  # Generic[T]
            if isinstance(name, (ast.Name, ast.Attribute)):
                yield from self.resolve(self.scope(module, None), ast.unparse(name))

    def order(self, place: Place, seen: tuple[Place, ...] = ()) -> list[Place]:
        """A class and its bases in the order in which Python looks a method up."""
        if place in seen:
            return []
        bases = self.bases(place)
        queues = [self.order(base, (*seen, place)) for base in bases] + [list(bases)]
        order = [place]
        while queues := [queue for queue in queues if queue]:
            heads = [queue[0] for queue in queues]
            free = [h for h in heads if not any(h in queue[1:] for queue in queues)]
            order.append(free[0] if free else heads[0])
            queues = [[each for each in queue if each != order[-1]] for queue in queues]
        return order

    def derived(self, places: Iterable[Place]) -> Iterator[tuple[Module, str, ast.ClassDef]]:
        """Every class that derives from one of these, directly or not.

        Yields:
            Its module, its qualified name, and its statement.
        """
        known, new = set(places), set(places)
        while new:
            names = {name.rpartition(".")[2] for _, name in new}
            found: set[Place] = set()
            for module in {m.name: m for name in names for m in self.mentioning(name)}.values():
                for name, node in classes(module.tree.body):
                    place = module.name, name
                    if place not in known and new.intersection(self.bases_of_node(module, node)):
                        found.add(place)
                        yield module, name, node
            known |= found
            new = found


_KNOWN: WeakKeyDictionary[Upstream, References] = WeakKeyDictionary()


def classes(body: Sequence[ast.AST], prefix: str = "") -> Iterator[tuple[str, ast.ClassDef]]:
    """The classes of a module, also those within functions, with their qualified names."""
    for node in body:
        inner = prefix
        if isinstance(node, ast.ClassDef):
            yield prefix + node.name, node
        if isinstance(node, (ast.ClassDef, *FUNCTION)):
            inner = f"{prefix}{node.name}."
        yield from classes(
            [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt)], inner
        )


def _outside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, FUNCTION):
            yield node
            yield from _outside_functions(node)


_Expression = tuple[ast.expr, str, ast.AST | None, str, Conditions]


def _expressions(tree: ast.Module) -> Iterator[_Expression]:
    """The names, dotted names and strings of a module that are values.

    Yields:
        Each with the function or class around it, the outermost function, its role, and the
        conditions that it is under.
    """
    yield from _block(tree.body, "", None, ())


def _block(
    body: Sequence[ast.stmt], holder: str, function: ast.AST | None, conditions: Conditions
) -> Iterator[_Expression]:
    for statement in body:
        if isinstance(statement, ast.If):
            test = ast.unparse(statement.test)
            yield from _values(statement.test, holder, function, "", conditions)
            for block, holds in ((statement.body, True), (statement.orelse, False)):
                under = (*conditions, (test, holds)) if function else conditions
                yield from _block(block, holder, function, under)
            if function and isinstance(statement.body[-1], ast.Return):
                conditions = (*conditions, (test, False))
        elif isinstance(statement, (ast.ClassDef, *FUNCTION)):
            name = holder
            if function is None:
                name = f"{holder}.{statement.name}".lstrip(".")
            inside = function
            if isinstance(statement, FUNCTION) and function is None:
                inside = statement
            yield from _block(statement.body, name, inside, conditions)
        else:
            yield from _statement(statement, holder, function, conditions)


def _statement(
    statement: ast.stmt, holder: str, function: ast.AST | None, conditions: Conditions
) -> Iterator[_Expression]:
    role = ""
    if isinstance(statement, ast.Assign):
        role = ast.unparse(statement.targets[0])
    elif isinstance(statement, ast.AnnAssign):
        role = ast.unparse(statement.target)
    elif isinstance(statement, ast.Return):
        role = "return"
    for name, child in ast.iter_fields(statement):
        if name in ("annotation", "targets", "target"):
            continue
        for node in child if isinstance(child, list) else [child]:
            if isinstance(node, ast.stmt):
                yield from _block([node], holder, function, conditions)
            elif isinstance(node, ast.ExceptHandler):
                yield from _block(node.body, holder, function, conditions)
            elif isinstance(node, ast.AST):
                yield from _values(node, holder, function, role, conditions)


def _values(
    node: ast.AST, holder: str, function: ast.AST | None, role: str, conditions: Conditions
) -> Iterator[_Expression]:
    if isinstance(node, ast.IfExp):
        test = ast.unparse(node.test)
        for value, holds in ((node.body, True), (node.orelse, False)):
            yield from _values(value, holder, function, role, (*conditions, (test, holds)))
        return
    if isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and is_dotted(node)):
        yield node, holder, function, role, conditions
        return
    if isinstance(node, ast.Constant):
        yield node, holder, function, role, conditions
        return
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in _TESTS:
        return
    for child in ast.iter_child_nodes(node):
        yield from _values(child, holder, function, role, conditions)


def is_dotted(node: ast.expr) -> bool:
    """Whether an expression is a name, or attributes of one."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)
