"""The decision which model runner serves, as source.

The decision is the property ``use_v2_model_runner`` and every method, function and constant of its
module that it uses, with the environment variable that overrides it. It is shown as a diff against
the pinned release's, and not interpreted.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from review.model import Model, shape, unified

PROPERTY, VARIABLE = "use_v2_model_runner", "VLLM_USE_V2_MODEL_RUNNER"
#: The file of Model Runner V1, without which most words have nothing to serve.
RUNNER = "vllm/v1/worker/gpu_model_runner.py"

_ENVS = "vllm/envs.py"
_IGNORED = ("logger",)


@dataclass(frozen=True)
class Decision:
    """The decision of one release.

    Attributes:
        path: of the file that has the property.
        line: of the property, one-based.
        text: the source of all that it uses in that file, and of the variable.
        digest: of that source without comments, docstrings and layout.
    """

    path: str
    line: int
    text: str
    digest: str


@dataclass(frozen=True)
class Runners:
    """The decisions of two releases.

    Attributes:
        before: of the pinned release; None if it has none.
        after: of the release.
        without_v1: whether the release lacks the file of Model Runner V1.
    """

    before: Decision | None
    after: Decision | None
    without_v1: bool

    @property
    def changed(self) -> bool:
        """True if a person must decide: the source has changed, or V1 is gone."""
        return self.without_v1 or (self.before and self.before.digest) != (
            self.after and self.after.digest
        )

    @property
    def diff(self) -> list[str]:
        """A unified diff of both sources."""
        return unified(*(each.text if each else "" for each in (self.before, self.after)))


def compare(base: Model, release: Model) -> Runners:
    """Return the decisions of both releases."""
    had = RUNNER in base.paths.values()
    without = had and RUNNER not in release.paths.values()
    return Runners(decision(base), decision(release), without)


def decision(model: Model) -> Decision | None:
    """Return the decision of a release; None if no file of ``vllm/config`` has the property."""
    paths = sorted(p for p in model.paths.values() if p.startswith("vllm/config"))
    for path in paths:
        text = model.text(path)
        if f"def {PROPERTY}(" not in text:
            continue
        tree = ast.parse(text)
        owners: list[ast.Module | ast.ClassDef] = [tree]
        owners += [node for node in tree.body if isinstance(node, ast.ClassDef)]
        for owner in owners:
            if first := _defined(owner).get(PROPERTY):
                used = _used(tree, owner, first)
                parts = [*(_source(text, each) for each in used), *_variable(model)]
                digest = hashlib.sha256("\n".join(map(shape, parts)).encode()).hexdigest()
                return Decision(path, first.lineno, "\n\n".join(parts), digest[:16])
    return None


def _defined(owner: ast.Module | ast.ClassDef) -> dict[str, ast.stmt]:
    """Return the functions and variables of a module or class by name."""
    found: dict[str, ast.stmt] = {}
    for node in owner.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found[node.name] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {each.id: node for each in targets if isinstance(each, ast.Name)}
    return found


def _used(tree: ast.Module, owner: ast.Module | ast.ClassDef, first: ast.stmt) -> list[ast.stmt]:
    """Return a statement and what it uses of its class and module, in the order of the file."""
    own, top = _defined(owner), _defined(tree)
    fields = (ast.Assign, ast.AnnAssign)
    methods = {name: node for name, node in own.items() if not isinstance(node, fields)}
    found, left = [first], [first]
    while left:
        for node in ast.walk(left.pop()):
            other: ast.stmt | None = None
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
                other = methods.get(node.attr)
            elif isinstance(node, ast.Name) and node.id not in _IGNORED:
                other = top.get(node.id)
            if other is not None and other not in found:
                found.append(other)
                left.append(other)
    return sorted(found, key=lambda node: node.lineno)


def _source(text: str, node: ast.stmt) -> str:
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(each.lineno for each in decorators)])
    return "\n".join(text.split("\n")[first - 1 : node.end_lineno])


def _variable(model: Model) -> Iterator[str]:
    """Yield the declaration and the value of the variable that overrides the decision."""
    if _ENVS not in model.paths.values():
        return
    text = model.text(_ENVS)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == VARIABLE:
            yield ast.unparse(node)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == VARIABLE:
                    yield f"{{{key.value!r}: {ast.unparse(value)}}}"
