"""Uses of upstream's names by our modules and seams, found without running anything.

Our sources are parsed, and jedi infers the types of values. Where a value may be anything, a
name is looked up among the definitions of the modules that our code names or patches; such a
use is not certain, and says so.
"""

from __future__ import annotations

import ast
import gc
import importlib.util
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jedi
from jedi.api.environment import InterpreterEnvironment
from overlay.pin import PACKAGE
from series.upstream import Upstream

from review.definitions import (
    FUNCTION,
    Definition,
    Definitions,
    Module,
    imported,
    key_name,
    module_name,
)
from review.our_source import OurSource

#: The ways to use a name, in the order in which they are listed.
HOW = ("holds a seam", "overridden", "called", "set", "read", "imported")

_OUR_PACKAGE = PACKAGE.replace("/", ".")
_DOTTED = re.compile(r"vllm(\.\w+)+")
#: With more candidates than this, those that are one import further away are left out.
_CANDIDATES = 6
#: Types whose attributes nobody takes for upstream's.
_BUILTIN = (str, bytes, int, float, list, dict, set, tuple, type, types.ModuleType)
_COMMON = (*_BUILTIN, types.FunctionType, types.FrameType)
#: Where other such types are declared: package, file, class.
_DECLARED = (
    ("torch", "_C/__init__.pyi", "TensorBase"),
    ("torch", "_C/__init__.pyi", "Event"),
    ("torch", "_C/__init__.pyi", "Stream"),
    ("torch", "_tensor.py", "Tensor"),
    ("numpy", "__init__.pyi", "ndarray"),
)


@dataclass(frozen=True)
class Use:
    """One place where our code uses a name of upstream's.

    Attributes:
        name: dotted; unqualified where it is not certain and may be one of several.
        kind: ``module``, ``class``, ``function`` or ``attribute``.
        how: one of :data:`HOW`.
        user: path and line in the overlaid release.
        certain: False if it was found by its name alone.
        places: the module and the qualified name of each definition that may be meant.
        keywords: the arguments that are passed by name.
    """

    name: str
    kind: str
    how: str
    user: str
    certain: bool
    places: tuple[tuple[str, str], ...]
    keywords: tuple[str, ...] = ()


def upstream_uses(tree: Path, base: Upstream, seams: Mapping[str, Sequence[range]]) -> list[Use]:
    """Every use of upstream's names by our modules, and by the lines that patches put in.

    Args:
        tree: a folder with the overlaid sources of the base release, as ``vllm/...``;
            a cache is kept beside it.
        base: the base release, pristine.
        seams: path to the one-based lines of the overlaid file that patches put in; an
            empty range stands before the line where something was taken out.

    Raises:
        OverlayError: a source cannot be parsed.
    """
    finder = _Finder(tree, Definitions.of(base), set(seams))
    collects = gc.isenabled()
    gc.disable()  # None of millions of nodes is garbage, and the search takes a fifth of the time.
    try:
        for file in sorted((tree / PACKAGE).rglob("*.py")):
            finder.read(file.relative_to(tree).as_posix(), None)
        for path, ranges in sorted(seams.items()):
            finder.read(path, ranges)
        return finder.uses()
    finally:
        if collects:
            gc.enable()


@dataclass(frozen=True)
class _Unresolved:
    """A name that inference cannot resolve.

    Attributes:
        how: as in :class:`Use`.
        user: as in :class:`Use`.
        literal: whether it is a string that is passed to ``getattr`` or the like.
    """

    name: str
    how: str
    user: str
    literal: bool


class _Finder:
    """Reads our modules and seams one by one, and then resolves the rest by name."""

    def __init__(self, tree: Path, base: Definitions, targets: set[str]) -> None:
        # Both are global to jedi: no user's cache is read or written.
        jedi.settings.cache_directory = str(tree.resolve().parent / ".jedi")
        self._tree = tree.resolve()
        self._project = jedi.Project(
            self._tree, sys_path=[str(self._tree)], smart_sys_path=False,
            load_unsafe_extensions=False,
        )  # fmt: skip
        self._environment = InterpreterEnvironment()
        self._base = base
        self._targets = targets
        paths = tuple(p.relative_to(tree).as_posix() for p in sorted((tree / "vllm").rglob("*.py")))
        self._overlaid = Definitions(Upstream(paths, lambda path: (tree / path).read_bytes()))
        self._uses: list[Use] = []
        self._unresolved: list[_Unresolved] = []
        #: Upstream's modules that our code names or patches.
        self._named: set[str] = set()
        #: Names that our own modules define.
        self._own: set[str] = set()

    def read(self, path: str, seams: Sequence[range] | None) -> None:
        """Read one of our modules, or the seams of one of upstream's."""
        source = OurSource(self._tree / path, path, seams)
        module = self._module(path)
        assert module is not None
        if seams is None:
            self._own |= {name.rpartition(".")[2] for name in module.definitions}
        else:
            self._named.add(module.name)
            for name, user in source.seam_holders():
                self._add(module.name, name, "holds a seam", user)
        names = self._imports(source, module)
        script = jedi.Script(
            source.text,
            path=self._tree / path,
            project=self._project,
            environment=self._environment,
        )
        for node in source.nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                self._name(source, module, names, node)
            elif isinstance(node, ast.Attribute):
                self._attribute(source, names, script, node)
            elif isinstance(node, ast.ClassDef):
                self._class(source, module, node)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                self._string(source, names, node.value, node)

    def uses(self) -> list[Use]:
        """All uses, once everything is read."""
        near = self._places(self._named)
        further = self._places(self._neighbours() - self._named)
        certain = {place for use in self._uses for place in use.places}
        common = _common_names()
        for unresolved in self._unresolved:
            places = tuple(near.get(unresolved.name, ()))
            beyond = tuple(further.get(unresolved.name, ()))
            if len(places) + len(beyond) <= _CANDIDATES:
                places += beyond
            if not places or unresolved.name in common:
                continue
            if not unresolved.literal and unresolved.name in self._own:
                continue  # as likely ours, and then it is checked by our own tests
            if certain.issuperset(places):
                for place in places:
                    self._add(*place, unresolved.how, f"{unresolved.user} (by name)")
                continue
            definitions = [d for d in (self._base.find(*place) for place in places) if d]
            kinds = {definition.kind for definition in definitions}
            name = definitions[0].full_name if len(places) == 1 else unresolved.name
            kind = kinds.pop() if len(kinds) == 1 else "attribute"
            self._uses.append(Use(name, kind, unresolved.how, unresolved.user, False, places))
        return self._uses

    def _module(self, path: str) -> Module | None:
        """A file of the tree; where the overlay leaves it alone, as the base has it."""
        overlaid = path in self._targets or path.startswith(PACKAGE + "/")
        return (self._overlaid if overlaid else self._base).module(module_name(path))

    def _places(self, modules: Iterable[str]) -> dict[str, list[tuple[str, str]]]:
        """Unqualified name to module and qualified name, of all that some modules define."""
        places: dict[str, list[tuple[str, str]]] = {}
        for name in sorted(modules):
            module = self._base.module(name)
            for qualified in module.definitions if module else ():
                places.setdefault(qualified.rpartition(".")[2], []).append((name, qualified))
        return places

    def _neighbours(self) -> set[str]:
        """The modules from which those that our code names import something."""
        neighbours = set()
        for name in self._named:
            module = self._base.module(name)
            for origin, original in module.imports.values() if module else ():
                if origin.partition(".")[0] == "vllm":
                    definition = self._base.find(origin, original)
                    neighbours.add(definition.module if definition else origin)
        return neighbours

    def _add(
        self, module: str, name: str, how: str, user: str, keywords: tuple[str, ...] = ()
    ) -> bool:
        """Record a use. Returns: False if the name is not one of upstream's."""
        if module == _OUR_PACKAGE or module.startswith(_OUR_PACKAGE + "."):
            return False
        definition = self._base.find(module, name) if module.startswith("vllm") else None
        if definition is None:
            return False  # another library's, or put in by a patch
        kind = definition.kind
        named = Definition(kind, module, name, definition.path, definition.line).full_name
        self._uses.append(Use(named, kind, how, user, True, ((module, name),), keywords))
        if definition.full_name != named:
            self._add(definition.module, definition.name, how, user, keywords)
        if kind == "class" and how == "called":
            constructor = self._base.find(definition.module, f"{definition.name}.__init__")
            if constructor is not None:
                self._add(constructor.module, constructor.name, how, user, keywords)
        return True

    def _imports(self, source: OurSource, module: Module) -> dict[str, tuple[str, str]]:
        """Record the imports. Returns: each imported name with its module and the name there."""
        within = {id(node) for node in source.nodes}
        names: dict[str, tuple[str, str]] = {}
        for node in ast.walk(source.tree):
            if not isinstance(node, (ast.Import, ast.ImportFrom)):
                continue
            names |= imported(node, module)
            for alias in node.names if id(node) in within else ():
                place = (alias.name, "")
                if isinstance(node, ast.ImportFrom):
                    place = (module.origin(node), alias.name)
                if self._add(*place, "imported", source.user(node)):
                    definition = self._base.find(*place)
                    assert definition is not None
                    self._named |= {place[0], definition.module}
        return names

    def _name(
        self,
        source: OurSource,
        module: Module,
        names: Mapping[str, tuple[str, str]],
        node: ast.Name,
    ) -> None:
        if source.is_local(node):
            return
        place = names.get(node.id)
        if place is None and source.seams is not None and node.id in module.definitions:
            place = (module.name, node.id)
        if place is not None and place[1]:
            how, user, keywords = source.use(node)
            self._add(*place, how, user, keywords)

    def _attribute(
        self,
        source: OurSource,
        names: Mapping[str, tuple[str, str]],
        script: jedi.Script,
        node: ast.Attribute,
    ) -> None:
        root = node.value
        while isinstance(root, ast.Attribute):
            root = root.value
        origin = names.get(root.id, ("vllm",)) if isinstance(root, ast.Name) else ("vllm",)
        if not origin[0].startswith("vllm"):
            return  # torch.float32 and the like need no inference.
        places = script.goto(node.end_lineno, (node.end_col_offset or 1) - 1, follow_imports=True)
        how, user, keywords = source.use(node)
        if not places:
            self._unresolved.append(_Unresolved(node.attr, how, user, literal=False))
        for place in places:
            if place.module_path is None or not place.module_path.is_relative_to(self._tree):
                continue
            module = self._module(place.module_path.relative_to(self._tree).as_posix())
            if module is None:
                continue
            name = module.names_by_line.get((place.line, place.name))
            if place.type == "module":
                name = ""
            if name is not None:
                self._add(module.name, name, how, user, keywords)

    def _class(self, source: OurSource, module: Module, node: ast.ClassDef) -> None:
        for base in self._overlaid.bases_of(module.name, node.name):
            self._add(base.module, base.name, "read", source.user(node))
            for method in node.body:
                if isinstance(method, FUNCTION):
                    definition = self._base.find(base.module, f"{base.name}.{method.name}")
                    if definition is not None:
                        place = (definition.module, definition.name)
                        self._add(*place, "overridden", source.user(method))

    def _string(
        self,
        source: OurSource,
        names: Mapping[str, tuple[str, str]],
        value: str,
        node: ast.Constant,
    ) -> None:
        user = source.user(node)
        if _DOTTED.fullmatch(value):
            if self._add(value, "", "imported", user):
                self._named.add(value)
            else:
                outer, _, last = value.rpartition(".")
                self._add(outer, last, "read", user)
        elif node in source.attribute_names:
            self._unresolved.append(_Unresolved(value, "read", user, literal=True))
        elif source.is_key(node):
            for origin in sorted({place[0] for place in names.values()}):
                module = self._base.module(origin)
                if module is None or value not in module.keys or origin.startswith(_OUR_PACKAGE):
                    continue
                definition = self._base.find(origin, key_name(value))
                assert definition is not None
                place = (origin, key_name(value))
                name = definition.full_name
                self._uses.append(Use(name, "attribute", "read", user, False, (place,)))


@cache
def _common_names() -> frozenset[str]:
    """Names that builtins, tensors and arrays have, as far as those are declared here."""
    names = {name for common in _COMMON for name in dir(common)}
    for package, file, declared in _DECLARED:
        spec = importlib.util.find_spec(package)  # finds a package without importing it
        for folder in (spec.submodule_search_locations or []) if spec else []:
            path = Path(folder) / file
            if path.is_file():
                names |= set(_members(path.read_text(), declared))
    return frozenset(names)


def _members(text: str, declared: str) -> Iterator[str]:
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name == declared:
            for member in node.body:
                if isinstance(member, FUNCTION):
                    yield member.name
                elif isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                    yield member.target.id
