"""Definitions: what upstream's modules define, found by parsing, and how two of them differ.

Nothing is imported. Comments, docstrings and layout count for nothing.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from overlay.errors import Exit, OverlayError
from series.upstream import Upstream

#: How a definition is compared with its successor, from the least to the worst.
FATES = ("same", "body", "signature", "moved", "gone")

Function = ast.FunctionDef | ast.AsyncFunctionDef
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
#: A decorator that ends so makes a method an attribute.
_PROPERTIES = ("property", "setter", "getter", "deleter")
#: Classes whose base ends so have members that are assigned; others' fields are annotated.
_MEMBERS = ("Enum", "Flag")
#: Statements whose blocks belong to what they stand in.
_BLOCKS = (ast.If, ast.Try, ast.With, ast.For, ast.While)
#: How much of an expression a sentence quotes.
_QUOTED = 120
#: How alike the top level of two modules must be for one to be the other, moved.
_ALIKE = 0.5

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

    @property
    def sort(self) -> str:
        """What it is to a reader: a property is no plain attribute."""
        decorated = any(isinstance(node, _FUNCTION) for node in self.nodes)
        return "property" if self.kind == "attribute" and decorated else self.kind

    def signature(self) -> list[str]:
        """What somebody who uses it relies on, beside what it does; one text a part."""
        return [part for node in self.nodes for part in _signature(node)]

    def body(self) -> list[str]:
        """What it does, or is assigned, line by line."""
        if self.kind in ("module", "class"):
            return []
        texts = [text for node in self.nodes for text in _body(node)]
        return texts if self.sort in ("function", "property") else sorted(texts)


class Module:
    """What one file defines and imports.

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
        except (SyntaxError, ValueError) as error:
            raise OverlayError(
                Exit.RELEASE,
                f"cannot be parsed by this Python ({error})",
                subject=path,
                next_step="run the review with a Python that the release supports",
            ) from None
        _simplify(self.tree)
        self._block(self.tree.body, "")

    def target(self, node: ast.ImportFrom) -> str:
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
            found = node.keys if isinstance(node, ast.Dict) else []
            if isinstance(node, ast.Subscript):
                found = [node.slice]
            for each in found:
                if isinstance(each, ast.Constant) and isinstance(each.value, str):
                    keys[each.value] = min(keys.get(each.value, each.lineno), each.lineno)
        return keys

    @cached_property
    def at(self) -> dict[tuple[int, str], str]:
        """Line and plain name of each definition's nodes to its qualified name."""
        return {
            (line, name.rpartition(".")[2]): name
            for name, found in self.definitions.items()
            for node in found.nodes
            for line in _lines(node, name)
        }

    def _block(self, body: Sequence[ast.stmt], prefix: str) -> None:
        for statement in body:
            if isinstance(statement, _FUNCTION):
                self._function(statement, prefix)
            elif isinstance(statement, ast.ClassDef):
                self._define("class", prefix + statement.name, statement)
                self._block(statement.body, f"{prefix}{statement.name}.")
            elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
                for target in _targets(statement):
                    if isinstance(target, ast.Name):
                        self._define("attribute", prefix + target.id, statement)
            elif isinstance(statement, ast.ImportFrom) and not prefix:
                self._import_from(statement)
            elif isinstance(statement, ast.Import) and not prefix:
                for alias in statement.names:
                    whole = alias.name if alias.asname else alias.name.partition(".")[0]
                    self.imports[alias.asname or whole] = (whole, "")
            elif isinstance(statement, _BLOCKS):
                for name in ("body", "orelse", "finalbody"):
                    self._block(getattr(statement, name, []), prefix)
                for handler in getattr(statement, "handlers", []):
                    self._block(handler.body, prefix)

    def _import_from(self, statement: ast.ImportFrom) -> None:
        origin = self.target(statement)
        for alias in statement.names:
            if alias.name == "*":
                self.stars.append(origin)
            else:
                self.imports[alias.asname or alias.name] = (origin, alias.name)

    def _function(self, node: Function, prefix: str) -> None:
        decorators = [ast.unparse(each).rpartition(".")[2] for each in node.decorator_list]
        attribute = prefix and any(each.endswith(_PROPERTIES) for each in decorators)
        self._define("attribute" if attribute else "function", prefix + node.name, node)
        arguments = [*node.args.posonlyargs, *node.args.args]
        if not prefix or not arguments or "staticmethod" in decorators:
            return
        for each in ast.walk(node):
            if isinstance(each, (ast.Assign, ast.AnnAssign)):
                for target in _targets(each):
                    if (
                        isinstance(target, ast.Attribute)
                        and isinstance(target.value, ast.Name)
                        and target.value.id == arguments[0].arg
                    ):
                        self._define("attribute", prefix + target.attr, each)

    def _define(self, kind: str, name: str, node: ast.stmt) -> None:
        found = self.definitions.get(name)
        if found is None:
            found = Definition(kind, self.name, name, self.path, node.lineno)
            self.definitions[name] = found
        found.nodes.append(node)


class Definitions:
    """Everything that one release defines; files are read when they are asked for."""

    def __init__(self, upstream: Upstream) -> None:
        self._read = upstream.read
        self.paths = {module_name(path): path for path in upstream.paths}
        self._modules: dict[str, Module] = {}

    def module(self, name: str) -> Module | None:
        """A module by its dotted name; None: there is none."""
        if name not in self._modules:
            path = self.paths.get(name)
            if path is None:
                return None
            self._modules[name] = Module(path, self._read(path))
        return self._modules[name]

    def find(self, module: str, name: str) -> Definition | None:
        """What a module makes of a qualified name, through imports and base classes.

        Args:
            module: dotted.
            name: qualified; empty for the module itself.
        """
        return self._find(module, name, set())

    def bases_of(self, module: str, name: str) -> Iterator[Definition]:
        """The base classes of a class that are defined here, nearest first, depth first."""
        found = self.find(module, name)
        if found is None or found.kind != "class":
            return
        for base in self._bases(found, set()):
            yield base
            yield from self.bases_of(base.module, base.name)

    def with_name(self, name: str) -> list[str]:
        """The modules that seem to define a plain name somewhere, sorted."""
        return self._mentions.get(name.encode(), [])

    @cached_property
    def _mentions(self) -> dict[bytes, list[str]]:
        mentions: dict[bytes, list[str]] = {}
        for module, path in sorted(self.paths.items()):
            for name in {a or b for a, b in _DEFINING.findall(self._read(path))}:
                mentions.setdefault(name, []).append(module)
        return mentions

    def _find(self, module: str, name: str, seen: set[tuple[str, str]]) -> Definition | None:
        there = self.module(module)
        if there is None or (module, name) in seen:
            return None
        seen.add((module, name))
        if not name:
            return Definition("module", module, "", there.path, 1)
        if name.startswith("["):
            line = there.keys.get(key_of(name))
            return Definition("attribute", module, name, there.path, line) if line else None
        if name in there.definitions:
            return there.definitions[name]
        if "." in name:
            return self._member(module, name, seen)
        return self._imported(there, name, seen) or self._find(f"{module}.{name}", "", seen)

    def _imported(self, there: Module, name: str, seen: set[tuple[str, str]]) -> Definition | None:
        origin, original = there.imports.get(name, ("", ""))
        if origin:
            found = self._find(origin, original, seen)
            return found or self._find(f"{origin}.{original}", "", seen)
        for star in there.stars:
            if found := self._find(star, name, seen):
                return found
        return None

    def _member(self, module: str, name: str, seen: set[tuple[str, str]]) -> Definition | None:
        outer, _, last = name.rpartition(".")
        owner = self._find(module, outer, seen)
        if owner is None:
            return None
        if owner.kind == "module":
            return self._find(owner.module, last, seen)
        if (owner.module, owner.name) != (module, outer):
            return self._find(owner.module, f"{owner.name}.{last}", seen)
        for base in self._bases(owner, seen):
            if found := self._find(base.module, f"{base.name}.{last}", seen):
                return found
        return None

    def _bases(self, owner: Definition, seen: set[tuple[str, str]]) -> Iterator[Definition]:
        for node in owner.nodes:
            for base in node.bases if isinstance(node, ast.ClassDef) else ():
                plain = base.value if isinstance(base, ast.Subscript) else base
                if not isinstance(plain, (ast.Name, ast.Attribute)):
                    continue
                found = self._find(owner.module, ast.unparse(plain), set())
                if found is not None and found.kind == "class" and found.nodes is not owner.nodes:
                    yield found


@dataclass(frozen=True)
class Successor:
    """What became of a definition.

    Attributes:
        fate: one of :data:`FATES`.
        now: its place in the release, if it is there.
        detail: a sentence, or nothing.
    """

    fate: str
    now: str | None
    detail: str


def successor(base: Definitions, release: Definitions, module: str, name: str) -> Successor:
    """What became of a name that the base release has.

    Args:
        base: the release that has it.
        release: the one that may have it.
        module: where somebody finds it, which may import it from elsewhere.
        name: qualified; empty for the module itself.
    """
    before = base.find(module, name)
    assert before is not None
    after = release.find(module, name)
    if after is not None:
        fate, changed = compare(before, after)
        if _position(before) == _position(after):
            return Successor(fate, after.place, changed)
        where = f"it is {after.full_name} now"
        still = "the old name still works" if name or before.path != after.path else ""
        return Successor("moved", after.place, _sentence(where, still, changed))
    elsewhere = _elsewhere(base, release, before)
    if _position(before)[:2] != (module, name):  # the name was imported there
        origin = release.find(before.module, before.name)
        elsewhere = [origin] if origin is not None else elsewhere
    if len(elsewhere) == 1:
        _, changed = compare(before, elsewhere[0])
        where = f"it is {elsewhere[0].full_name} now"
        return Successor("moved", elsewhere[0].place, _sentence(where, changed))
    if elsewhere:
        where = ", ".join(found.full_name for found in elsewhere[:3])
        return Successor("gone", None, f"New ones of that name: {where}.")
    alike = _alike(base, release, before)
    return Successor("gone", None, f"{alike.full_name} has the same body." if alike else "")


def compare(before: Definition, after: Definition) -> tuple[str, str]:
    """The fate of a definition whose successor is known, and a sentence on what differs."""
    if before.sort != after.sort:
        return "signature", f"It was a {before.sort}, and is a {after.sort}."
    if before.signature() != after.signature():
        return "signature", _sentence(_difference(before, after))
    old, new = before.body(), after.body()
    if old == new:
        return "same", ""
    if before.sort == "attribute":
        pairs = ((old, new), (new, old))
        was, now = (" and ".join(map(_short, _without(*pair))) or "nothing" for pair in pairs)
        return "body", f"Where it was assigned {was}, it is {now} now."
    operations = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    removed = sum(j - i for what, i, j, _, _ in operations if what != "equal")
    added = sum(j - i for what, _, _, i, j in operations if what != "equal")
    return "body", f"Statements: {removed} of {len(old)} are gone, {added} are new."


def name_of(key: str) -> str:
    """The qualified name that a dictionary's key goes by."""
    return f"[{key!r}]"


def key_of(name: str) -> str:
    """The key that :func:`name_of` has made a name of."""
    return str(ast.literal_eval(name)[0])


def module_name(path: str) -> str:
    """The dotted name of a file of the package."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _position(found: Definition) -> tuple[str, str, str]:
    # A module that has become a package is another file under the same name.
    return found.module, found.name, found.path


def _elsewhere(base: Definitions, release: Definitions, before: Definition) -> list[Definition]:
    """Where the release has the name, and the base had not."""
    if not before.name:
        return [found for found in [_moved_module(base, release, before)] if found]
    outer, _, last = before.name.rpartition(".")
    found = []
    for module in release.with_name(outer.rpartition(".")[2] or last):
        there = release.module(module)
        was = base.module(module)
        if there is None or (was is not None and before.name in was.definitions):
            continue
        if before.name in there.definitions:
            found.append(there.definitions[before.name])
    return found


def _moved_module(base: Definitions, release: Definitions, before: Definition) -> Definition | None:
    was = base.module(before.module)
    assert was is not None
    names = {name for name in was.definitions if "." not in name}
    best: tuple[float, Module] | None = None
    for module in release.paths:
        if module.rpartition(".")[2] != before.module.rpartition(".")[2] or module in base.paths:
            continue
        there = release.module(module)
        if there is None or not names:
            continue
        share = len(names & set(there.definitions)) / len(names)
        if share >= _ALIKE and (best is None or share > best[0]):
            best = share, there
    return Definition("module", best[1].name, "", best[1].path, 1) if best else None


def _alike(base: Definitions, release: Definitions, before: Definition) -> Definition | None:
    """A new name in the same place, for the same body."""
    there, was = release.module(before.module), base.module(before.module)
    if there is None or was is None or before.sort == "attribute" or not before.body():
        return None
    prefix = before.name.rpartition(".")[0]
    for name, found in there.definitions.items():
        new = name.rpartition(".")[0] == prefix and name not in was.definitions
        if new and found.sort == before.sort and found.body() == before.body():
            return found
    return None


def _simplify(tree: ast.Module) -> None:
    """Take out docstrings and the quotes around annotations."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTION)):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                del node.body[0]
                if not node.body and not isinstance(node, ast.Module):
                    node.body.append(ast.copy_location(ast.Pass(), first))
        if isinstance(node, (ast.arg, ast.AnnAssign)):
            node.annotation = _unquoted(node.annotation)
        elif isinstance(node, _FUNCTION):
            node.returns = _unquoted(node.returns)


def _unquoted(node: ast.expr | None) -> ast.expr | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        try:
            return ast.parse(node.value, mode="eval").body
        except SyntaxError:
            return node
    return node


def _targets(node: ast.Assign | ast.AnnAssign) -> Iterator[ast.expr]:
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        if isinstance(target, (ast.Tuple, ast.List)):
            for each in target.elts:
                yield each.value if isinstance(each, ast.Starred) else each
        else:
            yield target


def _lines(node: ast.AST, name: str) -> Iterator[int]:
    """The lines on which a node gives ``name`` to something."""
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        plain = name.rpartition(".")[2]
        for target in _targets(node):
            if plain in (getattr(target, "id", None), getattr(target, "attr", None)):
                yield target.end_lineno or target.lineno
    elif isinstance(node, ast.stmt):
        yield node.lineno


def _signature(node: ast.AST) -> Iterator[str]:
    if isinstance(node, (ast.ClassDef, *_FUNCTION)):
        for decorator in node.decorator_list:
            yield f"@{ast.unparse(decorator)}"
    if isinstance(node, ast.ClassDef):
        for base in (*node.bases, *node.keywords):
            yield f"base {ast.unparse(base)}"
        members = any(ast.unparse(base).endswith(_MEMBERS) for base in node.bases)
        for statement in node.body:
            if isinstance(statement, (ast.Assign, ast.AnnAssign) if members else ast.AnnAssign):
                yield f"field {ast.unparse(statement)}"
    elif isinstance(node, _FUNCTION):
        if isinstance(node, ast.AsyncFunctionDef):
            yield "async"
        yield from _parameters(node.args)
        if node.returns is not None:
            yield f"returns {ast.unparse(node.returns)}"
    elif isinstance(node, ast.AnnAssign):
        yield f"annotated {ast.unparse(node.annotation)}"


def _parameters(arguments: ast.arguments) -> Iterator[str]:
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    for index, (each, default) in enumerate(zip(positional, defaults, strict=True)):
        yield _parameter("parameter", each, default)
        if index + 1 == len(arguments.posonlyargs):
            yield "parameter /"
    if arguments.vararg:
        yield _parameter("parameter *", arguments.vararg, None)
    elif arguments.kwonlyargs:
        yield "parameter *"
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _parameter("parameter", each, default)
    if arguments.kwarg:
        yield _parameter("parameter **", arguments.kwarg, None)


def _parameter(what: str, node: ast.arg, default: ast.expr | None) -> str:
    text = f"{what}{node.arg}" if what.endswith("*") else f"{what} {node.arg}"
    if node.annotation is not None:
        text += f": {ast.unparse(node.annotation)}"
    return text if default is None else f"{text} = {ast.unparse(default)}"


def _body(node: ast.AST) -> Iterator[str]:
    if isinstance(node, _FUNCTION):
        for statement in node.body:
            yield from ast.unparse(statement).splitlines()
    elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
        yield ast.unparse(node.value)


def _difference(before: Definition, after: Definition) -> str:
    """How two signatures differ, in words."""
    old, new = before.signature(), after.signature()
    gone, come = _without(old, new), _without(new, old)
    words = []
    for text in list(gone):
        match = next((each for each in come if _key(each) == _key(text)), None)
        if match is not None:
            gone.remove(text)
            come.remove(match)
            words.append(f"{_short(text)} is {_short(_value(match))} now")
    words += [f"{_short(text)} is gone" for text in gone]
    words += [f"{_short(text)} is new" for text in come]
    shifted = [_value(text) for was, text in zip(old, new, strict=False) if was != text]
    return "; ".join(words) or f"another order: {_short(', '.join(shifted))}"


def _key(text: str) -> str:
    """What of a signature a text is about."""
    what, _, rest = text.partition(" ")
    if what in ("parameter", "field"):
        return f"{what} {re.split('[:= ]', rest, maxsplit=1)[0]}"
    return what if what in ("returns", "annotated") else text


def _value(text: str) -> str:
    return text.partition(" ")[2] or text


def _without(these: Iterable[str], those: Iterable[str]) -> list[str]:
    left = list(those)
    kept = []
    for each in these:
        if each in left:
            left.remove(each)
        else:
            kept.append(each)
    return kept


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _QUOTED else text[: _QUOTED - 1] + "…"


def _sentence(*parts: str) -> str:
    kept = [part.rstrip(".") for part in parts if part]
    text = "; ".join([kept[0], *(part[:1].lower() + part[1:] for part in kept[1:])])
    return text[:1].upper() + text[1:] + "."
