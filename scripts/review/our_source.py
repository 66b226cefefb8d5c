"""One file of the overlay, parsed: where names are used, and which strings stand for names."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from review.definitions import FUNCTION

#: Functions that take an object and the name of an attribute: built-in ones, and the runtime's
#: own ``wrapping.wrap_once``.
_BY_NAME = ("getattr", "setattr", "hasattr", "delattr", "wrap_once")
#: Methods of a dictionary that take a key.
_BY_KEY = ("get", "setdefault", "pop")


class OurSource:
    """One of our modules, or the seams in one of upstream's files.

    Attributes:
        path: in the overlaid release.
        seams: ranges of one-based lines that patches put in; None for the whole file.
        text: of the file.
        tree: the parsed file.
        nodes: those with a line, within the seams.
        attribute_names: the strings by which attributes are looked up.
    """

    def __init__(self, file: Path, path: str, seams: Sequence[range] | None) -> None:
        self.path = path
        self.seams = seams
        self.text = file.read_text()
        self.tree = ast.parse(self.text)
        self.attribute_names = set(_attribute_names(self.tree))
        self._parents = {
            child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)
        }
        self._locals: dict[ast.AST, set[str]] = {}
        lines = None if seams is None else {line for seam in seams for line in seam}
        self.nodes = [
            node
            for node in ast.walk(self.tree)
            if hasattr(node, "lineno") and (lines is None or _line(node) in lines)
        ]

    def user(self, node: ast.AST) -> str:
        """The place of a node."""
        return f"{self.path}:{_line(node)}{'' if self.seams is None else ' (seam)'}"

    def use(self, node: ast.expr) -> tuple[str, str, tuple[str, ...]]:
        """How a name is used, where, and which arguments are passed by name."""
        parent = self._parents.get(node)
        if isinstance(parent, ast.Call) and parent.func is node:
            keywords = tuple(keyword.arg for keyword in parent.keywords if keyword.arg)
            return "called", self.user(node), keywords
        how = "read" if isinstance(getattr(node, "ctx", None), ast.Load) else "set"
        return how, self.user(node), ()

    def is_key(self, node: ast.Constant) -> bool:
        """Whether a string is a key of a dictionary, as far as can be seen."""
        parent = self._parents.get(node)
        if isinstance(parent, ast.Call):
            return isinstance(parent.func, ast.Attribute) and parent.func.attr in _BY_KEY
        if isinstance(parent, ast.Subscript):
            return parent.slice is node
        return isinstance(parent, ast.Dict) and node in parent.keys

    def is_local(self, node: ast.Name) -> bool:
        """Whether a function around a name assigns it."""
        outer: ast.AST = node
        while outer in self._parents:
            outer = self._parents[outer]
            if isinstance(outer, FUNCTION) and node.id in self._locals_of(outer):
                return True
        return False

    def seam_holders(self) -> Iterator[tuple[str, str]]:
        """The functions and classes that seams are in: qualified name and place."""
        for seam in self.seams or ():
            names: set[str] = {""}
            for line in seam or (seam.start,):
                name = _holder(self.tree.body, line)
                if name not in names:
                    names.add(name)
                    yield name, f"{self.path}:{line} (seam)"

    def _locals_of(self, function: ast.AST) -> set[str]:
        if function not in self._locals:
            self._locals[function] = {
                node.arg if isinstance(node, ast.arg) else node.id
                for node in ast.walk(function)
                if isinstance(node, ast.arg)
                or (isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load))
            }
        return self._locals[function]


def _line(node: ast.AST) -> int:
    """The line of a node's own name: an attribute's is the last one."""
    return int(getattr(node, "end_lineno" if isinstance(node, ast.Attribute) else "lineno"))


def _holder(body: Sequence[ast.stmt], line: int, prefix: str = "") -> str:
    """The qualified name of the outermost function, or class without one, around a line."""
    for node in body:
        if not node.lineno <= line <= (node.end_lineno or node.lineno):
            continue
        if isinstance(node, FUNCTION):
            return prefix + node.name
        if isinstance(node, ast.ClassDef):
            name = prefix + node.name
            return _holder(node.body, line, f"{name}.") or name
        for block in ("body", "orelse", "finalbody"):
            if name := _holder(getattr(node, block, []), line, prefix):
                return name
    return ""


def _attribute_names(tree: ast.AST) -> Iterator[ast.Constant]:
    """The strings by which attributes are looked up.

    They are passed to ``getattr`` and the like, or to a function of the same module that
    passes them on there, directly or in a loop over a collection.
    """
    functions = [node for node in ast.walk(tree) if isinstance(node, FUNCTION)]
    positions = dict.fromkeys(_BY_NAME, 1)
    known = 0
    while known != len(positions):
        known = len(positions)
        for function in functions:
            names = [argument.arg for argument in function.args.args]
            for name in _passed(function, positions):
                if isinstance(name, ast.Name) and name.id in names:
                    positions[function.name] = names.index(name.id)
    constants = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    yield from (name for name in _passed(tree, positions) if isinstance(name, ast.Constant))
    for loop in ast.walk(tree):
        if isinstance(loop, ast.For):
            variables = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
            passed = {name.id for name in _passed(loop, positions) if isinstance(name, ast.Name)}
            if variables & passed:
                items = loop.iter
                if isinstance(items, ast.Name):
                    items = constants.get(items.id, items)
                yield from (node for node in ast.walk(items) if isinstance(node, ast.Constant))


def _passed(tree: ast.AST, positions: Mapping[str, int]) -> Iterator[ast.expr]:
    """The arguments of calls that take the name of an attribute at a known position."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            position = positions.get(node.func.id)
            if position is not None and position < len(node.args):
                yield node.args[position]
