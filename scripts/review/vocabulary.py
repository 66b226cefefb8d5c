"""The features and fixes that each of our modules serves, by the runtime's registry."""

from __future__ import annotations

import ast
import runpy
from collections.abc import Iterator
from pathlib import Path

from overlay.pin import PACKAGE

Words = frozenset[str]
NONE: Words = frozenset()

#: The registry's path below the package.
REGISTRY = "registry.py"
#: Modules that serve no word of their own: the doors, the switch, the log line and the probe.
FRAME = ("live", "registry", "feature", "version", "engine", "watch")

OURS = PACKAGE.replace("/", ".")


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
        file = folder / PACKAGE / REGISTRY
        declared = runpy.run_path(str(file)) if file.is_file() else {}
        self.features: Words = frozenset(declared.get("FEATURES", ()))
        self.fixes: Words = frozenset(declared.get("FIXES", ()))
        words = declared.get("WORDS", {})
        self.needs: dict[str, Words] = {name: frozenset(w.needs) for name, w in words.items()}
        self._homes: dict[str, Words] = {}
        for name, word in words.items():
            for home in word.homes:
                module = home.partition(":")[0]
                self._homes[module] = self._homes.get(module, NONE) | {name}
        self._imports = dict(_imports(folder / PACKAGE))

    @property
    def all(self) -> Words:
        """Every word."""
        return self.features | self.fixes

    def of_module(self, name: str) -> Words:
        """The words of a module: its own, or those of the modules that import it.

        Args:
            name: its name below ``readiness``, or its path.
        """
        name = short(name)
        seen, new, words = {name}, [name], NONE
        while new:
            module = new.pop()
            if own := self._homes.get(module, NONE):
                words |= own
            elif module.partition(".")[0] not in FRAME:
                users = {user for user, used in self._imports.items() if module in used} - seen
                seen |= users
                new += users
        return words


def _imports(folder: Path) -> Iterator[tuple[str, set[str]]]:
    """Each of our modules, with those of ours that it imports."""
    for file in sorted(folder.rglob("*.py")):
        imported = set()
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(OURS):
                inner = short(node.module or "")
                imported |= {inner, *(f"{inner}.{a.name}".lstrip(".") for a in node.names)}
        yield short(file.relative_to(folder.parents[2]).as_posix()), imported


def short(name: str) -> str:
    """The name of one of our modules below the package, from its path or its dotted name."""
    dotted = name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    return dotted.removeprefix(OURS).lstrip(".")
