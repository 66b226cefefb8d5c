"""What a function of a release refers to, as far as its sources say it.

Names are followed through imports, classes and their bases. The type of a value is known from
an annotation, or from the call that made it. A name whose value may be anything is skipped: a
callee is never guessed by its name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from review.definitions import (
    FUNCTION,
    Definition,
    Definitions,
    Function,
    Module,
    imported,
    is_static,
)

#: What a call of an instance runs; of a torch module that is ``forward``.
_CALLED = ("__call__", "forward")
#: What a call of a class runs.
_MAKING = ("__new__", "__init__", "__post_init__")
#: Generic types that are transparent: a value of the inner type has all that is looked up.
_TRANSPARENT = ("Optional", "Union", "ClassVar", "Final", "Annotated")


@dataclass(frozen=True)
class Reference:
    """A name that a function refers to.

    Attributes:
        module: where the name is looked up.
        name: qualified, as it is looked up there.
        definition: what it is.
    """

    module: str
    name: str
    definition: Definition


@dataclass(frozen=True)
class _Value:
    """What an expression may be: a definition, or an instance of a class."""

    module: str
    name: str
    instance: bool = False


class Calls:
    """Resolves the references of functions of one release."""

    def __init__(self, definitions: Definitions) -> None:
        self._definitions = definitions
        self._attributes: dict[tuple[str, str], set[_Value]] = {}

    def references(self, definition: Definition) -> list[Reference]:
        """The functions and constants that a function names, and the classes that it calls.

        Of a class that it calls the constructors are among them, and of an attribute that is a
        property the function. A constant is one of a module or a class: what is assigned in a
        function belongs to the function.
        """
        found: dict[tuple[str, str], Reference] = {}
        for function in self.functions(definition):
            scope = _Scope(self, definition, function)
            for node in ast.walk(function):
                for value in scope.named(node):
                    for reference in self._reference(value):
                        found.setdefault((reference.module, reference.name), reference)
        own = definition.module, definition.name
        return [each for place, each in found.items() if place != own]

    @staticmethod
    def functions(definition: Definition) -> Iterator[Function]:
        """The functions that a definition consists of: more than one for a property."""
        for node in definition.nodes:
            if isinstance(node, FUNCTION):
                yield node

    def _reference(self, value: _Value) -> Iterator[Reference]:
        definition = self._definitions.find(value.module, value.name)
        if definition is None or definition.kind == "module":
            return
        if definition.kind == "attribute" and not any(map(is_static, definition.nodes)):
            return  # the function that assigns it shows its value
        yield Reference(value.module, value.name, definition)

    def member(self, value: _Value, name: str) -> Iterator[_Value]:
        """The values of an attribute of a value."""
        owner = self._definitions.find(value.module, value.name)
        if owner is None:
            return
        if owner.kind == "attribute":
            for inner in self.type_of(owner):
                yield from self.member(inner, name)
        elif owner.kind in ("class", "module"):
            qualified = f"{owner.name}.{name}" if owner.name else name
            if self._definitions.find(owner.module, qualified) is not None:
                yield _Value(owner.module, qualified)
            elif owner.kind == "module" and f"{owner.module}.{name}" in self._definitions.paths:
                yield _Value(f"{owner.module}.{name}", "")

    def called(self, value: _Value) -> Iterator[_Value]:
        """What a call of a value runs."""
        for target in self._targets(value):
            if self.kind(target) == "class":
                if not target.instance:
                    yield target
                names = _CALLED if target.instance else _MAKING
                members = [m for name in names for m in self.member(target, name)]
                yield from members[:1] if target.instance else members

    def result(self, value: _Value) -> Iterator[_Value]:
        """What a call of a value returns."""
        for target in self._targets(value):
            definition = self._definitions.find(target.module, target.name)
            if definition is None:
                continue
            if definition.kind == "class" and not target.instance:
                yield _Value(definition.module, definition.name, instance=True)
            for function in self.functions(definition):
                yield from self.annotated(definition, function.returns)

    def type_of(self, definition: Definition) -> set[_Value]:
        """What an attribute of a module, a class or an instance may be; never an attribute."""
        place = definition.module, definition.name
        if place in self._attributes:
            return self._attributes[place]
        self._attributes[place] = set()  # an attribute that is made from itself
        values: set[_Value] = set()
        for node in definition.nodes:
            if isinstance(node, FUNCTION):
                values.update(self.annotated(definition, node.returns))
            elif isinstance(node, ast.AnnAssign):
                values.update(self.annotated(definition, node.annotation))
            elif isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Tuple):
                scope = self._around(definition, node)
                for value in scope.values(node.value) if scope is not None else ():
                    values.update(self._targets(value))
        self._attributes[place] = values
        return values

    def annotated(self, definition: Definition, node: ast.expr | None) -> Iterator[_Value]:
        """Instances of the classes that an annotation names."""
        if isinstance(node, ast.BinOp):
            yield from self.annotated(definition, node.left)
            yield from self.annotated(definition, node.right)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                yield from self.annotated(definition, ast.parse(node.value, mode="eval").body)
            except SyntaxError:
                return
        elif isinstance(node, ast.Subscript):
            if ast.unparse(node.value).rpartition(".")[2] in _TRANSPARENT:
                inner = node.slice
                for part in inner.elts if isinstance(inner, ast.Tuple) else [inner]:
                    yield from self.annotated(definition, part)
            else:
                yield from self.annotated(definition, node.value)
        elif isinstance(node, (ast.Name, ast.Attribute)):
            named = self._definitions.find(definition.module, ast.unparse(node))
            if named is not None and named.kind == "class":
                yield _Value(named.module, named.name, instance=True)

    def bases(self, module: str, name: str) -> Iterator[_Value]:
        """The bases of a class, as instances: what ``super()`` is."""
        for base in self._definitions.bases_of(module, name):
            yield _Value(base.module, base.name, instance=True)

    def module(self, name: str) -> Module | None:
        """A module of the release."""
        return self._definitions.module(name)

    def owner(self, definition: Definition) -> str:
        """The qualified name of the class that a definition is in; empty for none."""
        outer = definition.name.rpartition(".")[0]
        found = self._definitions.find(definition.module, outer) if outer else None
        return outer if found is not None and found.kind == "class" else ""

    def kind(self, value: _Value) -> str:
        """``module``, ``class``, ``function`` or ``attribute``; empty if there is none."""
        definition = self._definitions.find(value.module, value.name)
        return definition.kind if definition else ""

    def _targets(self, value: _Value) -> Iterable[_Value]:
        """A value, or those of the attribute that it is."""
        definition = self._definitions.find(value.module, value.name)
        if definition is not None and definition.kind == "attribute":
            return self.type_of(definition)
        return (value,)

    def _around(self, definition: Definition, node: ast.stmt) -> _Scope | None:
        """The scope of the function that an assignment is in, or of the module."""
        module, owner = self.module(definition.module), self.owner(definition)
        if module is None:
            return None
        for method in module.definitions.values():
            if method.name.rpartition(".")[0] == owner:
                for function in self.functions(method):
                    if function.lineno <= node.lineno <= (function.end_lineno or 0):
                        return _Scope(self, method, function)
        return _Scope(self, definition, None)


class _Scope:
    """The names that are known within one function.

    Args:
        calls: resolves what is outside of it.
        definition: the function; or an attribute, of a module or a class.
        function: its statement; None for the scope of a module.
    """

    def __init__(self, calls: Calls, definition: Definition, function: Function | None) -> None:
        self._calls = calls
        self._module = definition.module
        self._owner = calls.owner(definition)
        self._known: dict[str, set[_Value]] = {}
        self._busy: set[str] = set()
        self._assigned: dict[str, list[ast.expr]] = {}
        if function is not None:
            self._read(definition, function)

    def named(self, node: ast.AST) -> Iterator[_Value]:
        """What a node names, or runs; nothing for most nodes."""
        if isinstance(node, ast.Call):
            for value in self.values(node.func):
                yield from self._calls.called(value)
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
            if isinstance(node, ast.Name) and self._is_local(node.id):
                return
            for value in self.values(node):
                if not value.instance and self._calls.kind(value) != "class":
                    yield value

    def values(self, node: ast.expr) -> set[_Value]:
        """The values that an expression may have, as far as they are known."""
        return set(self._values(node))

    def _values(self, node: ast.expr) -> Iterator[_Value]:
        if isinstance(node, ast.Name):
            yield from self._name(node.id)
        elif isinstance(node, ast.Attribute):
            for value in self.values(node.value):
                yield from self._calls.member(value, node.attr)
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id == "super":
                yield from self._calls.bases(self._module, self._owner)
                return
            for value in self.values(node.func):
                yield from self._calls.result(value)
        elif isinstance(node, ast.Subscript):
            # A kernel of Triton is launched as kernel[grid](...).
            for value in self.values(node.value):
                if not value.instance:
                    yield value
        else:
            for part in _alternatives(node):
                yield from self._values(part)

    def _is_local(self, name: str) -> bool:
        return name in self._assigned or (
            name in self._known and not any(not value.instance for value in self._known[name])
        )

    def _name(self, name: str) -> Iterable[_Value]:
        if name in self._assigned and name not in self._known:
            if name in self._busy:
                return ()
            self._busy.add(name)
            self._known[name] = {v for node in self._assigned[name] for v in self.values(node)}
            self._busy.discard(name)
        if name in self._known:
            return self._known[name]
        value = _Value(self._module, name)
        return (value,) if self._calls.kind(value) else ()

    def _read(self, definition: Definition, function: Function) -> None:
        """Take in the parameters of a function, and what is assigned and imported in it."""
        arguments = function.args
        positional = [*arguments.posonlyargs, *arguments.args]
        every = [*positional, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        for argument in filter(None, every):
            self._known[argument.arg] = set(self._calls.annotated(definition, argument.annotation))
        static = any(ast.unparse(d) == "staticmethod" for d in function.decorator_list)
        if self._owner and positional and not static:
            self._known[positional[0].arg] = {_Value(self._module, self._owner, instance=True)}
        for node in ast.walk(function):
            self._bind(definition, node)
        for node in ast.walk(function):
            name = ""  # of something whose value may be anything
            if isinstance(node, (*FUNCTION, ast.ClassDef)) and node is not function:
                name = node.name
            elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                name = node.id
            if name and name not in self._assigned:
                self._known.setdefault(name, set())

    def _bind(self, definition: Definition, node: ast.AST) -> None:
        """Take in what an import, an assignment or an annotation says of a local name."""
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = self._calls.module(self._module)
            for name, place in imported(node, module).items() if module else ():
                self._known[name] = {_Value(*place)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            self._known.setdefault(node.target.id, set()).update(
                self._calls.annotated(definition, node.annotation)
            )
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    self._assigned.setdefault(target.id, []).append(node.value)
        elif isinstance(node, ast.NamedExpr):
            self._assigned.setdefault(node.target.id, []).append(node.value)


def _alternatives(node: ast.expr) -> Sequence[ast.expr]:
    """The expressions one of which an expression is."""
    if isinstance(node, (ast.NamedExpr, ast.Await)):
        return [node.value]
    if isinstance(node, ast.IfExp):
        return [node.body, node.orelse]
    return node.values if isinstance(node, ast.BoolOp) else []
