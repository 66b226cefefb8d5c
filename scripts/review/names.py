"""Names: what our modules and seams rely on in upstream's code, and what became of it.

What is relied on is found by parsing our sources and by static inference (jedi), which
neither imports nor runs anything. Where inference says nothing, because a value may be
anything, a name is looked up among the definitions of the modules that our code names or
patches; such a find is not certain, and says so.
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
from typing import Any

import jedi
from jedi.api.environment import InterpreterEnvironment
from overlay.pin import PACKAGE
from series.upstream import Upstream

from review.definitions import (
    FATES,
    Definition,
    Definitions,
    Module,
    Successor,
    module_name,
    name_of,
    successor,
)

#: How something is used, in the order in which the uses are named.
HOW = ("holds a seam", "overridden", "called", "set", "read", "imported")

_OURS = PACKAGE.replace("/", ".")
_DOTTED = re.compile(r"vllm(\.\w+)+")
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
#: With more candidates than this, those that are one import further away are left out.
_CANDIDATES = 6
#: Built in, and given an object and a name.
_BY_NAME = ("getattr", "setattr", "hasattr", "delattr")
#: Methods of a dictionary that are given a key.
_BY_KEY = ("get", "setdefault", "pop")
#: Types whose attributes nobody takes for upstream's.
_BUILTIN = (str, bytes, int, float, list, dict, set, tuple, type, types.ModuleType)
_PLAIN = (*_BUILTIN, types.FunctionType, types.FrameType)
#: Where other types' attributes are declared: package, file, class.
_DECLARED = (
    ("torch", "_C/__init__.pyi", "TensorBase"),
    ("torch", "_C/__init__.pyi", "Event"),
    ("torch", "_C/__init__.pyi", "Stream"),
    ("torch", "_tensor.py", "Tensor"),
    ("numpy", "__init__.pyi", "ndarray"),
)


@dataclass(frozen=True)
class Use:
    """One place where our code relies on upstream's.

    Attributes:
        name: dotted; the bare name where it is not certain and may be one of several.
        kind: ``module``, ``class``, ``function`` or ``attribute``.
        how: one of :data:`HOW`.
        user: path and line in the overlaid release.
        certain: False: found by its name alone.
        at: the module and the qualified name of each definition that may be meant.
        keywords: the arguments that are passed by name.
    """

    name: str
    kind: str
    how: str
    user: str
    certain: bool
    at: tuple[tuple[str, str], ...]
    keywords: tuple[str, ...] = ()


def relied_on(tree: Path, base: Upstream, seams: Mapping[str, Sequence[range]]) -> list[Use]:
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
    finder = _Finder(tree, Definitions(base), set(seams))
    collects = gc.isenabled()
    gc.disable()  # Nothing of millions of nodes is garbage, and looking takes a fifth of the time.
    try:
        for file in sorted((tree / PACKAGE).rglob("*.py")):
            finder.read(file.relative_to(tree).as_posix(), None)
        for path, ranges in sorted(seams.items()):
            finder.read(path, ranges)
        return finder.uses()
    finally:
        if collects:
            gc.enable()


def fates(uses: Iterable[Use], base: Upstream, release: Upstream) -> list[dict[str, Any]]:
    """What became of each name that is relied on, the worst first.

    Args:
        uses: what :func:`relied_on` has found.
        base: the release that the overlay is for.
        release: the one that is looked at.

    Raises:
        OverlayError: a source cannot be parsed.
    """
    before, after = Definitions(base), Definitions(release)

    @cache
    def became(module: str, name: str) -> Successor:
        return successor(before, after, module, name)

    grouped: dict[tuple[bool, str], list[Use]] = {}
    for use in uses:
        grouped.setdefault((use.certain, use.name), []).append(use)
    entries = []
    for (certain, name), group in grouped.items():
        at = group[0].at
        origin, fate, now, detail = _together([(before.find(*e), became(*e)) for e in at])
        if fate != "same":
            detail = " ".join(filter(None, (detail, _lost(group, at, before, after))))
        users = sorted({use.user for use in group}, key=_by_line)
        entries.append(
            {
                "name": name,
                "kind": group[0].kind,
                "fate": fate,
                "was": origin.place,
                "now": now,
                "detail": detail,
                "how": [how for how in HOW if any(use.how == how for use in group)],
                "users": users,
                "certain": certain,
            }
        )
    return sorted(entries, key=lambda e: (-FATES.index(e["fate"]), not e["certain"], e["name"]))


def _together(
    found: Sequence[tuple[Definition | None, Successor]],
) -> tuple[Definition, str, str | None, str]:
    """What became of a name that may be any of several.

    It is gone only if all of them are, and moved if some are.
    """
    left = [each for each in found if each[1].fate != "gone"]
    origin, worst = max(left or found, key=lambda each: FATES.index(each[1].fate))
    assert origin is not None
    if len(found) == 1:
        return origin, worst.fate, worst.now, worst.detail
    # Which of them is meant is not known: one that is gone must not look like nothing.
    fate = worst.fate if len(left) in (0, len(found)) else "moved"
    parts = [
        f"{each.full_name}: {then.fate}{' (' if then.detail else ''}{then.detail.rstrip('.')}"
        f"{')' if then.detail else ''}."
        for each, then in found
        if each is not None and then.fate != "same"
    ]
    same = [each.full_name for each, then in found if each is not None and then.fate == "same"]
    if same:
        parts.append(f"{'As before' if parts else 'May be'}: {', '.join(same)}.")
    return origin, fate, worst.now, " ".join(parts)


def _lost(
    group: Sequence[Use], at: Sequence[tuple[str, str]], base: Definitions, release: Definitions
) -> str:
    """A sentence on the keywords that we pass and that are taken no more."""
    passed = {keyword for use in group for keyword in use.keywords}
    if len(at) != 1 or not passed:
        return ""
    before, after = base.find(*at[0]), release.find(*at[0])
    if before is None or after is None:
        return ""
    lost = sorted(passed & _taken(before) - _taken(after)) if not _takes_any(after) else []
    return f"We pass {', '.join(lost)} by name." if lost else ""


def _taken(found: Definition) -> set[str]:
    """The names that a function's parameters, or a class's fields, have."""
    words = (re.match(r"(?:parameter|field) (\w+)", part) for part in found.signature())
    return {match[1] for match in words if match}


def _takes_any(found: Definition) -> bool:
    return any(part.startswith("parameter **") for part in found.signature())


def _by_line(user: str) -> tuple[str, int]:
    path, _, rest = user.rpartition(":")
    return path, int(rest.split()[0])


@dataclass(frozen=True)
class _Unknown:
    """A name that inference says nothing about.

    Attributes:
        how: as in :class:`Use`.
        user: as in :class:`Use`.
        given: whether it is a string, given to something that looks it up.
    """

    name: str
    how: str
    user: str
    given: bool


class _Finder:
    """Reads our modules and seams one by one, and then matches what is left by name."""

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
        self._unknown: list[_Unknown] = []
        #: Upstream's modules that our code names or patches.
        self._named: set[str] = set()
        #: Names that our own modules define.
        self._own: set[str] = set()

    def read(self, path: str, seams: Sequence[range] | None) -> None:
        """Read one of our modules, or the seams of one of upstream's."""
        source = _Source(self._tree / path, path, seams)
        module = self._module(path)
        assert module is not None
        if seams is None:
            names = module.definitions
            self._own |= {name.rpartition(".")[2] for name in names}
        else:
            self._named.add(module.name)
            for use in source.holders():
                self._add(module.name, *use)
        self._imports(source, module, seams is not None)
        script = jedi.Script(
            source.text,
            path=self._tree / path,
            project=self._project,
            environment=self._environment,
        )
        for node in source.nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                self._name(source, module, node)
            elif isinstance(node, ast.Attribute):
                self._attribute(source, module, script, node)
            elif isinstance(node, ast.ClassDef):
                self._class(source, module, node)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                self._string(source, node.value, node)

    def uses(self) -> list[Use]:
        """All uses, once everything is read."""
        near = self._definitions(self._named)
        further = self._definitions(self._neighbours() - self._named)
        certain = {at for use in self._uses for at in use.at}
        plain = _plain_names()
        for unknown in self._unknown:
            at = tuple(near.get(unknown.name, ()))
            beyond = tuple(further.get(unknown.name, ()))
            if len(at) + len(beyond) <= _CANDIDATES:
                at += beyond
            if not at or unknown.name in plain:
                continue
            if not unknown.given and unknown.name in self._own:
                continue  # as likely ours, and then it is checked by our own tests
            if certain.issuperset(at):
                for each in at:
                    self._add(*each, unknown.how, f"{unknown.user} (by name)")
                continue
            found = [self._base.find(*each) for each in at]
            kinds = {each.kind for each in found if each is not None}
            name = found[0].full_name if len(at) == 1 and found[0] else unknown.name
            kind = kinds.pop() if len(kinds) == 1 else "attribute"
            self._uses.append(Use(name, kind, unknown.how, unknown.user, False, at))
        return self._uses

    def _module(self, path: str) -> Module | None:
        """A file of the tree; where the overlay leaves it alone, as the base has it."""
        touched = path in self._targets or path.startswith(PACKAGE + "/")
        return (self._overlaid if touched else self._base).module(module_name(path))

    def _definitions(self, modules: Iterable[str]) -> dict[str, list[tuple[str, str]]]:
        """Plain name to module and qualified name, of all that some modules define."""
        found: dict[str, list[tuple[str, str]]] = {}
        for name in sorted(modules):
            there = self._base.module(name)
            for qualified in there.definitions if there else ():
                found.setdefault(qualified.rpartition(".")[2], []).append((name, qualified))
        return found

    def _neighbours(self) -> set[str]:
        """The modules from which those that our code names import something."""
        found = set()
        for name in self._named:
            there = self._base.module(name)
            for origin, original in there.imports.values() if there else ():
                if origin.partition(".")[0] == "vllm":
                    definition = self._base.find(origin, original)
                    found.add(definition.module if definition else origin)
        return found

    def _add(
        self,
        module: str,
        name: str,
        how: str,
        user: str,
        keywords: tuple[str, ...] = (),
        certain: bool = True,
    ) -> bool:
        """Note a use, if it is upstream's that is used."""
        if module == _OURS or module.startswith(_OURS + ".") or not module.startswith("vllm"):
            return False
        found = self._base.find(module, name)
        if found is None:
            return False  # Put in by a patch.
        named = Definition(found.kind, module, name, found.path, found.line).full_name
        self._uses.append(Use(named, found.kind, how, user, certain, ((module, name),), keywords))
        if found.full_name != named:
            self._add(found.module, found.name, how, user, keywords, certain)
        if found.kind == "class" and how == "called":
            made = self._base.find(found.module, f"{found.name}.__init__")
            if made is not None:
                self._add(made.module, made.name, how, user, keywords, certain)
        return True

    def _imports(self, source: _Source, module: Module, in_seams: bool) -> None:
        wanted = {id(node) for node in source.nodes}
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ImportFrom):
                origin = module.target(node)
                for alias in node.names:
                    source.imported[alias.asname or alias.name] = (origin, alias.name)
                    if id(node) in wanted and self._add(
                        origin, alias.name, "imported", source.user(node)
                    ):
                        found = self._base.find(origin, alias.name)
                        self._named |= {origin, found.module if found else origin}
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    whole = alias.name if alias.asname else alias.name.partition(".")[0]
                    source.imported[alias.asname or whole] = (whole, "")
                    if id(node) in wanted and self._add(
                        alias.name, "", "imported", source.user(node)
                    ):
                        self._named.add(alias.name)

    def _name(self, source: _Source, module: Module, node: ast.Name) -> None:
        if source.is_local(node):
            return
        if node.id in source.imported:
            at = source.imported[node.id]
        elif source.seams is not None and node.id in module.definitions:
            at = (module.name, node.id)
        else:
            return
        if at[1]:
            how, user, keywords = source.used(node)
            self._add(*at, how, user, keywords)

    def _attribute(
        self, source: _Source, module: Module, script: jedi.Script, node: ast.Attribute
    ) -> None:
        root = node.value
        while isinstance(root, ast.Attribute):
            root = root.value
        origin = (
            source.imported.get(root.id, ("vllm",)) if isinstance(root, ast.Name) else ("vllm",)
        )
        if not origin[0].startswith("vllm"):
            return  # torch.float32 and the like need no inference.
        found = script.goto(node.end_lineno, (node.end_col_offset or 1) - 1, follow_imports=True)
        how, user, keywords = source.used(node)
        if not found:
            self._unknown.append(_Unknown(node.attr, how, user, given=False))
        for each in found:
            if each.module_path is None or not each.module_path.is_relative_to(self._tree):
                continue
            there = self._module(each.module_path.relative_to(self._tree).as_posix())
            if there is None:
                continue
            name = "" if each.type == "module" else there.at.get((each.line, each.name))
            if name is not None:
                self._add(there.name, name, how, user, keywords)

    def _class(self, source: _Source, module: Module, node: ast.ClassDef) -> None:
        for base in self._overlaid.bases_of(module.name, node.name):
            self._add(base.module, base.name, "read", source.user(node))
            for each in node.body:
                if isinstance(each, _FUNCTION):
                    found = self._base.find(base.module, f"{base.name}.{each.name}")
                    if found is not None:
                        self._add(found.module, found.name, "overridden", source.user(each))

    def _string(self, source: _Source, value: str, node: ast.Constant) -> None:
        user = source.user(node)
        if _DOTTED.fullmatch(value):
            if self._add(value, "", "imported", user):
                self._named.add(value)
            else:
                outer, _, last = value.rpartition(".")
                self._add(outer, last, "read", user)
        elif node in source.looked_up:
            self._unknown.append(_Unknown(value, "read", user, given=True))
        elif source.is_key(node):
            for origin in sorted({at[0] for at in source.imported.values()}):
                there = self._base.module(origin)
                if there is not None and value in there.keys:
                    self._add(origin, name_of(value), "read", user, certain=False)


class _Source:
    """A file of which all, or the seams alone, are looked at."""

    def __init__(self, file: Path, path: str, seams: Sequence[range] | None) -> None:
        self.path = path
        self.seams = seams
        self.text = file.read_text()
        self.tree = ast.parse(self.text)
        self.parents = {
            child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)
        }
        self.imported: dict[str, tuple[str, str]] = {}
        self.looked_up = set(_looked_up(self.tree))
        self._locals: dict[ast.AST, set[str]] = {}
        lines = None if seams is None else {line for each in seams for line in each}
        self.nodes = [
            node
            for node in ast.walk(self.tree)
            if hasattr(node, "lineno") and (lines is None or _line(node) in lines)
        ]

    def user(self, node: ast.AST) -> str:
        """Where a node is."""
        return f"{self.path}:{_line(node)}{'' if self.seams is None else ' (seam)'}"

    def used(self, node: ast.expr) -> tuple[str, str, tuple[str, ...]]:
        """How a name is used, where, and what is passed by name."""
        parent = self.parents.get(node)
        if isinstance(parent, ast.Call) and parent.func is node:
            keywords = tuple(each.arg for each in parent.keywords if each.arg)
            return "called", self.user(node), keywords
        how = "read" if isinstance(getattr(node, "ctx", None), ast.Load) else "set"
        return how, self.user(node), ()

    def is_key(self, node: ast.Constant) -> bool:
        """Whether a string is a key of a dictionary, as far as can be seen."""
        parent = self.parents.get(node)
        if isinstance(parent, ast.Call):
            return isinstance(parent.func, ast.Attribute) and parent.func.attr in _BY_KEY
        if isinstance(parent, ast.Subscript):
            return parent.slice is node
        return isinstance(parent, ast.Dict) and node in parent.keys

    def is_local(self, node: ast.Name) -> bool:
        """Whether a name is given to something within a function around it."""
        return any(
            node.id in self._given_in(outer)
            for outer in self._around(node)
            if isinstance(outer, _FUNCTION)
        )

    def holders(self) -> Iterator[tuple[str, str, str]]:
        """The functions and classes in which seams stand: qualified name, how, and where."""
        for seam in self.seams or ():
            held: set[str] = {""}
            for line in seam or (seam.start,):
                name = _holder(self.tree.body, line)
                if name not in held:
                    held.add(name)
                    yield name, "holds a seam", f"{self.path}:{line} (seam)"

    def _around(self, node: ast.AST) -> Iterator[ast.AST]:
        while (outer := self.parents.get(node)) is not None:
            yield outer
            node = outer

    def _given_in(self, function: ast.AST) -> set[str]:
        if function not in self._locals:
            inside = list(ast.walk(function))
            self._locals[function] = {
                each.id
                for each in inside
                if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load)
            } | {each.arg for each in inside if isinstance(each, ast.arg)}
        return self._locals[function]


def _line(node: ast.AST) -> int:
    """The line of a node's own name: an attribute's is where it ends."""
    return int(getattr(node, "end_lineno" if isinstance(node, ast.Attribute) else "lineno"))


def _holder(body: Sequence[ast.stmt], line: int, prefix: str = "") -> str:
    """The qualified name of the function or class that a line is in; empty: of neither."""
    for node in body:
        if not node.lineno <= line <= (node.end_lineno or node.lineno):
            continue
        if isinstance(node, _FUNCTION):
            return prefix + node.name
        if isinstance(node, ast.ClassDef):
            name = prefix + node.name
            return _holder(node.body, line, f"{name}.") or name
        for block in ("body", "orelse", "finalbody"):
            if found := _holder(getattr(node, block, []), line, prefix):
                return found
    return ""


def _looked_up(tree: ast.AST) -> Iterator[ast.Constant]:
    """The strings by which something is looked up as an attribute.

    They are given to ``getattr`` and the like, or to a function of the same module that
    hands them on there, as they are or one by one from a collection.
    """
    functions = [node for node in ast.walk(tree) if isinstance(node, _FUNCTION)]
    positions = dict.fromkeys(_BY_NAME, 1)
    known = 0
    while known != len(positions):
        known = len(positions)
        for function in functions:
            names = [each.arg for each in function.args.args]
            for name in _given(function, positions):
                if isinstance(name, ast.Name) and name.id in names:
                    positions[function.name] = names.index(name.id)
    constants = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for name in _given(tree, positions):
        if isinstance(name, ast.Constant):
            yield name
    for loop in ast.walk(tree):
        if isinstance(loop, ast.For):
            variables = {each.id for each in ast.walk(loop.target) if isinstance(each, ast.Name)}
            given = {each.id for each in _given(loop, positions) if isinstance(each, ast.Name)}
            if variables & given:
                over = loop.iter
                if isinstance(over, ast.Name):
                    over = constants.get(over.id, over)
                yield from (each for each in ast.walk(over) if isinstance(each, ast.Constant))


def _given(tree: ast.AST, positions: Mapping[str, int]) -> Iterator[ast.expr]:
    """What is given to functions as the name of an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            position = positions.get(node.func.id)
            if position is not None and position < len(node.args):
                yield node.args[position]


@cache
def _plain_names() -> frozenset[str]:
    """Names that builtins, tensors and arrays have, as far as those are declared here."""
    names = {name for each in _PLAIN for name in dir(each)}
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
            for each in node.body:
                if isinstance(each, _FUNCTION):
                    yield each.name
                elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    yield each.target.id
