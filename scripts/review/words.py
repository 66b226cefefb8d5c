"""The features and fixes that each seam and each patch serves: those of the modules it calls."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping

from overlay.patches import Series, split_lines
from series.upstream import Upstream

from review.definitions import FUNCTION
from review.vocabulary import DOORS, NONE, OURS, Vocabulary, Words


class Seams:
    """The words of the lines that patches put into upstream's files.

    Args:
        vocabulary: of our modules.
        series: the patches.
        base: the release that they are for.
        overlaid: by path, the patched files.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        series: Series,
        base: Upstream,
        overlaid: Mapping[str, bytes],
    ) -> None:
        self._vocabulary = vocabulary
        self._origins = _origins(series, base)
        self._direct: dict[tuple[str, int], Words] = {}
        for path, data in overlaid.items():
            for line, words in self._read(data):
                if self._origin(path, line):
                    known = self._direct.get((path, line), NONE)
                    self._direct[path, line] = known | words
        self._patches: dict[str, Words] = {patch.name: NONE for patch in series.patches}
        for (path, line), words in self._direct.items():
            self._patches[self._origin(path, line)] |= words

    def of_patch(self, name: str) -> Words:
        """The words that a patch serves; none for one of the frame."""
        return self._patches.get(name, NONE)

    def at(self, path: str, line: int) -> Words:
        """The words of a line; those of its patch if it calls nothing itself."""
        origin = self._origin(path, line)
        return self._direct.get((path, line)) or self.of_patch(origin)

    def of_hunk(self, patch: str, ours: Iterable[str]) -> Words:
        """The words of the lines of a hunk; those of its patch if they call nothing."""
        text = {line.strip() for line in ours if line.strip()}
        words = NONE
        for path, origins in self._origins.items():
            for line, (origin, content) in enumerate(origins, 1):
                if origin == patch and content.decode(errors="replace").strip() in text:
                    words |= self._direct.get((path, line), NONE)
        return words or self.of_patch(patch)

    def lines(self) -> Iterator[tuple[str, int, Words]]:
        """Path, one-based line and words of every line that a patch put in."""
        for path, origins in self._origins.items():
            for line, (origin, _) in enumerate(origins, 1):
                if origin:
                    yield path, line, self.at(path, line)

    def _origin(self, path: str, line: int) -> str:
        origins = self._origins.get(path, [])
        return origins[line - 1][0] if 0 < line <= len(origins) else ""

    def _read(self, data: bytes) -> Iterator[tuple[int, Words]]:
        """The lines of a patched file that lead to our modules, with their words."""
        tree = ast.parse(data)
        modules: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(OURS):
                inner = (node.module or "").removeprefix(OURS).lstrip(".")
                for alias in node.names:
                    name = f"{inner}.{alias.name}".lstrip(".")
                    modules[alias.asname or alias.name] = name
                    yield node.lineno, self._vocabulary.asked(name)
        for function in ast.walk(tree):
            if isinstance(function, (*FUNCTION, ast.ClassDef)):
                yield from self._function(function, modules)

    def _function(
        self, function: ast.AST, modules: Mapping[str, str]
    ) -> Iterator[tuple[int, Words]]:
        values: dict[str, Words] = {}
        doors: set[str] = set()
        for node in ast.walk(function):
            words = self._called(node, modules)
            if words is None:
                continue
            first = getattr(node, "lineno", 1)
            for line in range(first, (getattr(node, "end_lineno", first) or first) + 1):
                yield line, words
        for node in ast.walk(function):
            value = getattr(node, "value", None)
            if not isinstance(node, (ast.Assign, ast.NamedExpr)) or value is None:
                continue
            found = [self._called(each, modules) for each in _chain(value)]
            words = frozenset().union(*(each for each in found if each))
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            # What comes back beside the first is upstream's.
            for target in (t.elts[0] if isinstance(t, ast.Tuple) else t for t in targets):
                if isinstance(target, ast.Name) and any(each is not None for each in found):
                    values[target.id] = words
                    if "readiness_live.of" in ast.unparse(value) and not words:
                        doors.add(target.id)
        for node in ast.walk(function):
            if isinstance(node, (ast.Attribute, ast.Compare)):
                owner = node.value if isinstance(node, ast.Attribute) else node.left
                name = owner.id if isinstance(owner, ast.Name) else ""
                words = values.get(name, NONE)
                if name in doors and isinstance(node, ast.Attribute):
                    words = self._vocabulary.of_verb(node.attr)
                if words:
                    yield node.lineno, words

    def _called(self, node: ast.AST, modules: Mapping[str, str]) -> Words | None:
        """The words of a chain that begins at one of our modules; None for anything else."""
        if not isinstance(node, ast.Attribute):
            return None
        root: ast.expr = node.value
        if isinstance(root, ast.Name) and root.id in modules:
            module = modules[root.id]
            if module in DOORS:
                return self._vocabulary.of_verb(node.attr)
            return self._vocabulary.asked(module)
        if isinstance(root, ast.Call) and isinstance(root.func, ast.Attribute):
            inner = root.func.value
            if isinstance(inner, ast.Name) and modules.get(inner.id) in DOORS:
                return self._vocabulary.of_verb(node.attr)
        return None


def _chain(node: ast.AST) -> Iterator[ast.AST]:
    """An expression, and what it calls or takes an attribute of, from the outside in."""
    while isinstance(node, (ast.Call, ast.Attribute)):
        yield node
        node = node.func if isinstance(node, ast.Call) else node.value


def _origins(series: Series, base: Upstream) -> dict[str, list[tuple[str, bytes]]]:
    """By path, the patch that each line of the overlaid file is from, and the line."""
    origins: dict[str, list[tuple[str, bytes]]] = {}
    for patch in series.patches:
        for file in patch.files:
            path = file.path
            if path not in origins:
                origins[path] = [("", line) for line in split_lines(base.read(path))]
            for hunk in reversed(file.hunks):
                new = [(patch.name, line) for line in hunk.new]
                origins[path][hunk.old_at : hunk.old_at + len(hunk.old)] = new
    return origins
