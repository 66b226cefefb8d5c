"""Names that a release defines, found by parsing and resolved through imports and base classes.

Nothing is imported. Docstrings and quotes around annotations are dropped on parsing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from weakref import WeakKeyDictionary

from overlay.errors import Exit, OverlayError
from series.upstream import Upstream

Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
ASSIGNMENT = (ast.Assign, ast.AnnAssign, ast.AugAssign)
#: A decorator that ends so makes a method an attribute.
_PROPERTIES = ("property", "setter", "getter", "deleter")
#: Statements whose blocks belong to the scope that they are in.
_BLOCKS = (ast.If, ast.Try, ast.With, ast.For, ast.While)

_DEFINING = re.compile(rb"^[ \t]*(?:async[ \t]+def|def|class)[ \t]+(\w+)|^(\w+)[ \t]*[:=]", re.M)


@dataclass
class Definition:
    """One name of one module.

    Attributes:
        kind: ``module``, ``class``, ``function`` or ``attribute``.
        module: dotted.
        name: qualified within the module; empty for the module itself.
        path: the file.
        line: of the first node, one-based.
        nodes: function and class statements, and assignments.
    """

    kind: str
    module: str
    name: str
    path: str
    line: int
    nodes: list[ast.AST] = field(default_factory=list)

    @property
    def place(self) -> str:
        """Path and line."""
        return f"{self.path}:{self.line}"

    @property
    def full_name(self) -> str:
        """Dotted, with the module."""
        dot = "." if self.name and not self.name.startswith("[") else ""
        return f"{self.module}{dot}{self.name}"


class Module:
    """Definitions and imports of one file.

    Attributes:
        definitions: by qualified name, without those within functions.
        imports: name to the module and the name in it; empty: the module itself.
        stars: modules of which everything is imported.
        tree: the parsed file, without docstrings.
    """

    def __init__(self, path: str, data: bytes) -> None:
        self.path = path
        self.name = module_name(path)
        self.definitions: dict[str, Definition] = {}
        self.imports: dict[str, tuple[str, str]] = {}
        self.stars: list[str] = []
        self._package = self.name if path.endswith("/__init__.py") else self.name.rpartition(".")[0]
        try:
            self.tree = ast.parse(data)
            _simplify(self.tree)
            self._read_block(self.tree.body, "")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise OverlayError(
                Exit.RELEASE,
                f"cannot be parsed by this Python ({error})",
                subject=path,
                next_step="run the review with a Python that the release supports",
            ) from None

    def origin(self, node: ast.ImportFrom) -> str:
        """The dotted module that a ``from`` statement names."""
        if not node.level:
            return node.module or ""
        parts = self._package.split(".")
        kept = parts[: len(parts) - node.level + 1]
        return ".".join([*kept, node.module] if node.module else kept)

    @cached_property
    def keys(self) -> dict[str, int]:
        """The strings that are keys of dictionaries in this module, and their first lines."""
        keys: dict[str, int] = {}
        for node in ast.walk(self.tree):
            candidates = node.keys if isinstance(node, ast.Dict) else []
            if isinstance(node, ast.Subscript):
                candidates = [node.slice]
            for key in candidates:
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    keys[key.value] = min(keys.get(key.value, key.lineno), key.lineno)
        return keys

    @cached_property
    def names_by_line(self) -> dict[tuple[int, str], str]:
        """Line and last part of each definition's nodes to its qualified name."""
        return {
            (line, name.rpartition(".")[2]): name
            for name, definition in self.definitions.items()
            for node in definition.nodes
            for line in _lines(node, name.rpartition(".")[2])
        }

    def _read_block(self, body: Sequence[ast.stmt], prefix: str) -> None:
        for statement in body:
            if isinstance(statement, FUNCTION):
                self._read_function(statement, prefix)
            elif isinstance(statement, ast.ClassDef):
                self._define("class", prefix + statement.name, statement)
                self._read_block(statement.body, f"{prefix}{statement.name}.")
            elif isinstance(statement, ASSIGNMENT):
                for target in _targets(statement):
                    if isinstance(target, ast.Name):
                        self._define("attribute", prefix + target.id, statement)
            elif isinstance(statement, (ast.Import, ast.ImportFrom)) and not prefix:
                names = imported(statement, self)
                self.stars += [names.pop("*")[0]] if "*" in names else []
                self.imports |= names
            elif isinstance(statement, _BLOCKS):
                for block in ("body", "orelse", "finalbody"):
                    self._read_block(getattr(statement, block, []), prefix)
                for handler in getattr(statement, "handlers", []):
                    self._read_block(handler.body, prefix)

    def _read_function(self, node: Function, prefix: str) -> None:
        decorators = [ast.unparse(call).rpartition(".")[2] for call in node.decorator_list]
        attribute = prefix and any(name.endswith(_PROPERTIES) for name in decorators)
        self._define("attribute" if attribute else "function", prefix + node.name, node)
        arguments = [*node.args.posonlyargs, *node.args.args]
        if not prefix or not arguments or "staticmethod" in decorators:
            return
        for inner in ast.walk(node):
            if isinstance(inner, (ast.Assign, ast.AnnAssign)):
                for target in _targets(inner):
                    if (
                        isinstance(target, ast.Attribute)
                        and isinstance(target.value, ast.Name)
                        and target.value.id == arguments[0].arg
                    ):
                        self._define("attribute", prefix + target.attr, inner)

    def _define(self, kind: str, name: str, node: ast.stmt) -> None:
        new = Definition(kind, self.name, name, self.path, node.lineno)
        self.definitions.setdefault(name, new).nodes.append(node)


class Definitions:
    """Everything that one release defines; a file is parsed when a name in it is asked for.

    Attributes:
        text: returns the bytes of a file.
        paths: dotted module to its file.
    """

    def __init__(self, upstream: Upstream) -> None:
        self.text = upstream.read
        self.paths = {module_name(path): path for path in upstream.paths}
        self._modules: dict[str, Module] = {}

    @classmethod
    def of(cls, upstream: Upstream) -> Definitions:
        """Those of a release, read and parsed once for as long as somebody holds ``upstream``."""
        if upstream not in _KNOWN:
            _KNOWN[upstream] = cls(upstream)
        return _KNOWN[upstream]

    def module(self, name: str) -> Module | None:
        """A module by its dotted name; None if the release has no such module."""
        if name not in self._modules:
            path = self.paths.get(name)
            if path is None:
                return None
            self._modules[name] = Module(path, self.text(path))
        return self._modules[name]

    def find(self, module: str, name: str) -> Definition | None:
        """Resolve a qualified name through imports and base classes.

        Args:
            module: dotted; where the name is used from.
            name: qualified; empty for the module itself.
        """
        return self._find(module, name, set())

    def bases_of(self, module: str, name: str) -> Iterator[Definition]:
        """The base classes of a class that the release defines, nearest first, depth first."""
        owner = self.find(module, name)
        if owner is None or owner.kind != "class":
            return
        for base in self._bases(owner):
            yield base
            yield from self.bases_of(base.module, base.name)

    def with_name(self, name: str) -> list[str]:
        """The modules that seem to define an unqualified name somewhere, sorted."""
        return self._mentions.get(name.encode(), [])

    @cached_property
    def _mentions(self) -> dict[bytes, list[str]]:
        mentions: dict[bytes, list[str]] = {}
        for module, path in sorted(self.paths.items()):
            for name in {a or b for a, b in _DEFINING.findall(self.text(path))}:
                mentions.setdefault(name, []).append(module)
        return mentions

    def _find(self, module: str, name: str, seen: set[tuple[str, str]]) -> Definition | None:
        source = self.module(module)
        if source is None or (module, name) in seen:
            return None
        seen.add((module, name))
        if not name:
            return Definition("module", module, "", source.path, 1)
        if name.startswith("["):
            line = source.keys.get(str(ast.literal_eval(name)[0]))
            return Definition("attribute", module, name, source.path, line) if line else None
        if name in source.definitions:
            return source.definitions[name]
        if "." in name:
            return self._member(module, name, seen)
        return self._imported(source, name, seen) or self._find(f"{module}.{name}", "", seen)

    def _imported(self, source: Module, name: str, seen: set[tuple[str, str]]) -> Definition | None:
        origin, original = source.imports.get(name, ("", ""))
        if origin:
            definition = self._find(origin, original, seen)
            return definition or self._find(f"{origin}.{original}", "", seen)
        stars = (self._find(star, name, seen) for star in source.stars)
        return next(filter(None, stars), None)

    def _member(self, module: str, name: str, seen: set[tuple[str, str]]) -> Definition | None:
        outer, _, last = name.rpartition(".")
        owner = self._find(module, outer, seen)
        if owner is None:
            return None
        if owner.kind == "module":
            return self._find(owner.module, last, seen)
        if (owner.module, owner.name) != (module, outer):
            return self._find(owner.module, f"{owner.name}.{last}", seen)
        bases = (self._find(b.module, f"{b.name}.{last}", seen) for b in self._bases(owner))
        return next(filter(None, bases), None)

    def _bases(self, owner: Definition) -> Iterator[Definition]:
        for node in owner.nodes:
            for base in node.bases if isinstance(node, ast.ClassDef) else ():
                name = base.value if isinstance(base, ast.Subscript) else base  # Generic[T]
                if not isinstance(name, (ast.Name, ast.Attribute)):
                    continue
                definition = self.find(owner.module, ast.unparse(name))
                if (
                    definition is not None
                    and definition.kind == "class"
                    and definition.nodes is not owner.nodes
                ):
                    yield definition


_KNOWN: WeakKeyDictionary[Upstream, Definitions] = WeakKeyDictionary()


def imported(statement: ast.Import | ast.ImportFrom, module: Module) -> dict[str, tuple[str, str]]:
    """The names that a statement imports, each with its module and the name there, or nothing."""
    if isinstance(statement, ast.ImportFrom):
        origin = module.origin(statement)
        return {alias.asname or alias.name: (origin, alias.name) for alias in statement.names}
    names = {}
    for alias in statement.names:
        whole = alias.name if alias.asname else alias.name.partition(".")[0]
        names[alias.asname or whole] = (whole, "")
    return names


def module_name(path: str) -> str:
    """The dotted name of a file of the package."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def key_name(key: str) -> str:
    """The qualified name under which a dictionary's key is looked up."""
    return f"[{key!r}]"


def is_static(node: ast.AST) -> bool:
    """Whether a node defines a name of a module or a class, and not of an instance."""
    if isinstance(node, ASSIGNMENT):
        return any(isinstance(target, ast.Name) for target in _targets(node))
    return True


def _simplify(tree: ast.Module) -> None:
    """Drop docstrings and the quotes around annotations."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTION)):
            documented = ast.get_docstring(node, clean=False) is not None
            node.body = node.body[documented:]
            if not node.body and not isinstance(node, ast.Module):
                node.body = [ast.Pass(lineno=node.lineno, col_offset=0)]
        if isinstance(node, (ast.arg, ast.AnnAssign)):
            node.annotation = _unquoted(node.annotation)
        elif isinstance(node, FUNCTION):
            node.returns = _unquoted(node.returns)


def _unquoted(node: ast.expr | None) -> ast.expr | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        try:
            return ast.parse(node.value, mode="eval").body
        except SyntaxError:
            return node
    return node


def _targets(node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> Iterator[ast.expr]:
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        if isinstance(target, (ast.Tuple, ast.List)):
            for element in target.elts:
                yield element.value if isinstance(element, ast.Starred) else element
        else:
            yield target


def _lines(node: ast.AST, name: str) -> Iterator[int]:
    """The lines on which a node defines an unqualified name."""
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        for target in _targets(node):
            if name in (getattr(target, "id", None), getattr(target, "attr", None)):
                yield target.end_lineno or target.lineno
    elif isinstance(node, ast.stmt):
        yield node.lineno
