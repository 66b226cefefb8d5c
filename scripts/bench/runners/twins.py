"""Stock's modules, loaded under names of their own in a process that runs the overlay.

A twin is made from the pristine file of a module. Its imports find twins first, and then the
modules of the process.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

#: The packages that a worker's step is made of. Modules elsewhere are the process's own.
PACKAGES = ("vllm/v1/worker", "vllm/v1/sample", "vllm/v1/spec_decode")


class Twins:
    """The modules that differ between stock and overlaid, from pristine files.

    Attributes:
        names: the modules that get a twin: those that the overlay changes, and those of
            :data:`PACKAGES` that import them, directly or not.
    """

    def __init__(self, site: Path, changed: Iterable[str]) -> None:
        """Find the modules.

        Args:
            site: a pristine site-packages directory.
            changed: paths in it that the overlay changes.
        """
        self._site = site
        paths = {file.relative_to(site).as_posix() for p in PACKAGES for file in _sources(site / p)}
        imports = {module_name(path): _imports(site, path) for path in paths}
        self.names = {module_name(path) for path in paths & {*changed}}
        while found := {n for n, used in imports.items() if used & self.names} - self.names:
            self.names |= found
        self._builtins = {**vars(builtins), "__import__": self._import}

    def load(self, name: str) -> ModuleType:
        """Return the twin of a module, one of :attr:`names`."""
        twin = twin_name(name)
        if twin in sys.modules:
            return sys.modules[twin]
        spec = importlib.util.spec_from_file_location(twin, self._site / self._path(name))
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # Functions find these as long as they live, so that late imports find twins, too.
        vars(module)["__builtins__"] = self._builtins
        sys.modules[twin] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[twin]
            raise
        return module

    def inside(self, name: str) -> bool:
        """Return whether a package holds modules that get a twin."""
        return any(one.startswith(f"{name}.") for one in self.names)

    def _path(self, name: str) -> str:
        return f"{name.replace('.', '/')}.py"

    def _import(
        self,
        name: str,
        namespace: Mapping[str, object] | None = None,
        scope: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> object:
        """Import as a twin does."""
        real = builtins.__import__(name, namespace, scope, fromlist or (), level)
        if not fromlist:
            return Package(self, name) if (name := name.partition(".")[0]) == "vllm" else real
        if level:
            package = str((namespace or {})["__package__"])
            name = importlib.util.resolve_name("." * level + name, package)
        if name in self.names:
            return self.load(name)
        return Package(self, name) if self.inside(name) else real


class Package:
    """A package whose attributes are twins, where there are some."""

    def __init__(self, twins: Twins, name: str) -> None:
        self._twins, self.__name__ = twins, name

    def __getattr__(self, attribute: str) -> Any:
        name = f"{self.__name__}.{attribute}"
        if name in self._twins.names:
            return self._twins.load(name)
        if self._twins.inside(name):
            return Package(self._twins, name)
        return getattr(sys.modules[self.__name__], attribute)


def module_name(path: str) -> str:
    """Return the name of the module at a path in site-packages."""
    return path.removesuffix(".py").replace("/", ".")


def twin_name(name: str) -> str:
    """Return the name of a module's twin: in the same package, so that relative imports work."""
    package, _, stem = name.rpartition(".")
    return f"{package}.stock_{stem}"


def is_twin(name: str) -> bool:
    """Return whether a module is a twin, by its name."""
    return name.rpartition(".")[2].startswith("stock_")


def _sources(folder: Path) -> Iterator[Path]:
    # Nothing that the overlay changes is a package's own file.
    return (file for file in folder.rglob("*.py") if file.name != "__init__.py")


def _imports(site: Path, path: str) -> set[str]:
    """Return the names that a module imports, wherever in it, other than for type checkers."""
    package = module_name(path).rpartition(".")[0]
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            nodes: Iterable[ast.AST] = node.orelse
        else:
            nodes = ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            module = importlib.util.resolve_name(module, package) if node.level else module
            found.update((module, *(f"{module}.{alias.name}" for alias in node.names)))
        for child in nodes:
            visit(child)

    visit(ast.parse((site / path).read_bytes()))
    return found
