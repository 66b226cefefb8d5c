"""What upstream has changed in the files that the patches change, statement by statement.

Comments, docstrings, layout, and the order of imports and functions do not count. All else does:
a patch may apply to a file in which a new method changes our rows, or an import names another
class. Four things are set aside, since nothing that runs with our seams can depend on them:

- what stands under ``if TYPE_CHECKING`` never runs;
- the fixed text of a call ``logger.info(...)`` and the like reaches only a log;
- ``pass`` does nothing;
- an import that is new does nothing by itself, if the file imported that module before, and the
  name is not in the file before: whatever uses it has changed as well, and is here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from review.changes import compare
from review.definitions import FUNCTION, Definition, Definitions, Module, imported, module_name
from review.findings import COLUMNS, Finding, listed, rows
from review.trees import Shape, first_line, is_idle, lines_of, shape, unified

#: The name under which the imports of a file are compared: all at once.
IMPORTS = "imports"
#: The same of those that are made for type checkers alone.
_UNUSED_IMPORTS = "imports under TYPE_CHECKING"
#: Statements that are compared by what is in their blocks.
_BLOCKS = (ast.If, ast.Try, ast.With)
#: The characters of a statement that name it, if it defines nothing.
_NAMED = 60
#: The conditions under which nothing runs.
_NOT_RUN = ("if TYPE_CHECKING", "if typing.TYPE_CHECKING")

#: The conditions that a statement is under, and its shape.
_Guarded = tuple[tuple[str, ...], Shape]


@dataclass
class _Part:
    """The statements of one name.

    Attributes:
        name: qualified; for a statement that defines nothing, its beginning.
        kind: "function", "class", "statement" or "import".
        shapes: of each statement, with the conditions that it is under.
        quiet: the same without the texts of log messages.
        nodes: the statements.
        runs: whether any of them does.
        data: of the file.
    """

    name: str
    kind: str
    data: bytes
    runs: bool = False
    shapes: list[_Guarded] = field(default_factory=list)
    quiet: list[_Guarded] = field(default_factory=list)
    nodes: list[ast.AST] = field(default_factory=list)

    @property
    def text(self) -> bytes:
        """The lines of the statements."""
        return b"\n".join(_text(self.data, node) for node in self.nodes)

    @property
    def line(self) -> int:
        """The first line."""
        return first_line(self.nodes[0])


def examine(
    paths: Iterable[str],
    base: Definitions,
    release: Definitions,
    known: Collection[str],
    used: Collection[str],
) -> list[Finding]:
    """What has changed in the files that the patches change.

    Args:
        paths: the files; those that the release lacks are left out.
        base: the release that the overlay is for.
        release: the one under review.
        known: full names of definitions whose change is shown elsewhere.
        used: unqualified names that the overlay uses.

    Returns:
        The entries under "drift" in review.json, for each file those first that touch most of
        what we use. Each has ``touches``, names that we use in changed lines, and ``counts``,
        False for what is set aside.

    Raises:
        OverlayError: a source cannot be parsed, or git fails.
    """
    findings = []
    for path in paths:
        before, after = (side.module(module_name(path)) for side in (base, release))
        if before is None or after is None or base.text(path) == release.text(after.path):
            continue
        parts = (
            _parts(before, base.text(before.path)),
            _parts(after, release.text(after.path)),
        )
        here = [
            found
            for found in _compared(before, after, *parts)
            if f"{before.name}.{found['name']}" not in known
        ]
        for found in here:
            changed = re.findall(r"^[-+](.*)$", found["diff"], re.MULTILINE)
            words = set(re.findall(r"\w+", "\n".join(changed)))
            found["touches"] = sorted(words & set(used))
            found["what"] = f"{before.name}.{found.pop('name')}"
            if touches := ", ".join(found["touches"]):
                found["why"] += f"; it touches {touches}"
        here.sort(key=lambda found: (not found["counts"], -len(found["touches"]), found["what"]))
        findings += here
    return findings


def warnings(findings: Sequence[Finding]) -> Iterator[str]:
    """What needs eyes, by file."""
    by_file: dict[str, list[str]] = {}
    for found in findings:
        if found["counts"]:
            module = module_name(found["file"])
            by_file.setdefault(found["file"], []).append(found["what"].removeprefix(f"{module}."))
    for path, names in by_file.items():
        yield f"{path}, which a patch changes, has changed in {listed(names)}"


def section(
    findings: Sequence[Finding], versions: tuple[str, str]
) -> tuple[str, str, Sequence[str], list[str]]:
    """Heading, anchor, columns and rows; the versions are of the base and of the release."""
    counted = [found for found in findings if found["counts"]]
    heading = f"Other changes in the files that we patch: {len(counted):,}"
    return heading, "patched", COLUMNS, rows(counted, versions)


def _compared(
    before: Module, after: Module, old: dict[str, _Part], new: dict[str, _Part]
) -> Iterator[dict[str, Any]]:
    whole = {name for name in {*old, *new} if (old.get(name) or new[name]).kind == "class"} & (
        set(old) ^ set(new)
    )
    for name in [*old, *(name for name in new if name not in old)]:
        if any(name.startswith(f"{cls}.") for cls in whole):
            continue  # its class is new or gone as a whole
        was, now = old.get(name), new.get(name)
        if was and now and _same(was, now):
            continue
        counts = not _set_aside(was, now) and not (
            name == IMPORTS and was and now and _only_more(before, was, now)
        )
        old_text, new_text = (
            (_whole(part) if name in whole else part.text) if part else b"" for part in (was, now)
        )
        part = was or now
        assert part is not None
        yield {
            "name": name,
            "file": before.path,
            "line": part.line,
            "now": f"{after.path}:{now.line}" if now else None,
            "kind": "changed" if was and now else "gone" if was else "new",
            "detail": _detail(before, after, name) if was and now else "",
            "why": "in a file that a patch changes",
            "ours": [before.path],
            "elsewhere": False,
            "counts": counts,
            "diff": unified(
                old_text, new_text, (was.nodes if was else (), now.nodes if now else ())
            ),
        }
    yield from _reordered(before, after, old, new)


def _reordered(
    before: Module, after: Module, old: dict[str, _Part], new: dict[str, _Part]
) -> Iterator[dict[str, Any]]:
    """Statements that run when the file is imported, and do so in another order."""
    both = [name for name, part in old.items() if name in new and _runs_at_once(part)]
    order = [name for name in new if name in old and _runs_at_once(old[name])]
    if both == order:
        return
    first = next(i for i, (one, other) in enumerate(zip(both, order, strict=True)) if one != other)
    names_before, names_after = (
        "".join(f"{name}\n" for name in names).encode() for names in (both, order)
    )
    yield {
        "name": "order",
        "file": before.path,
        "line": old[both[first]].line,
        "now": f"{after.path}:{new[order[first]].line}",
        "kind": "changed",
        "detail": f"{order[first]} comes before {both[first]} now.",
        "why": "in a file that a patch changes",
        "ours": [before.path],
        "elsewhere": False,
        "counts": True,
        "diff": unified(names_before, names_after),
    }


def _parts(module: Module, data: bytes) -> dict[str, _Part]:
    """The statements of a module and its classes, by name, in order."""
    parts: dict[str, _Part] = {}
    for node, prefix, guards in _statements(module.tree.body, "", ()):
        runs = not any(guard in _NOT_RUN for guard in guards)
        for kind, name, what in _names(node, module):
            full = prefix + (_UNUSED_IMPORTS if kind == "import" and not runs else name)
            part = parts.setdefault(full, _Part(full, kind, data))
            part.shapes.append((guards, what))
            part.quiet.append((guards, shape(node, quiet=True)))
            if not part.nodes or part.nodes[-1] is not node:
                part.nodes.append(node)
            part.runs |= runs
    return parts


def _statements(
    body: Sequence[ast.stmt], prefix: str, guards: tuple[str, ...]
) -> Iterator[tuple[ast.stmt, str, tuple[str, ...]]]:
    """Every statement outside of functions, with its class and the conditions that it is under."""
    for node in body:
        if isinstance(node, _BLOCKS):
            for block in ("body", "orelse", "finalbody"):
                inner = (*guards, _guard(node, block))
                yield from _statements(getattr(node, block, []), prefix, inner)
            for handler in getattr(node, "handlers", []):
                inner = (*guards, f"except {_source(handler.type)} {handler.name}")
                yield from _statements(handler.body, prefix, inner)
            continue
        yield node, prefix, guards
        if isinstance(node, ast.ClassDef):
            yield from _statements(node.body, f"{prefix}{node.name}.", guards)


def _guard(node: ast.If | ast.Try | ast.With, block: str) -> str:
    if isinstance(node, ast.If):
        return f"if {_source(node.test)}" if block == "body" else f"else of {_source(node.test)}"
    if isinstance(node, ast.With):
        return f"with {', '.join(map(_source, node.items))}"
    return f"try {block}"


def _names(node: ast.stmt, module: Module) -> Iterator[tuple[str, str, Shape]]:
    """Kind, name and shape of what a statement defines."""
    if isinstance(node, FUNCTION):
        yield "function", node.name, shape(node)
    elif isinstance(node, ast.ClassDef):
        header = [*node.decorator_list, *node.bases, *node.keywords]
        yield "class", node.name, shape(*header)
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        for name, origin in imported(node, module).items():
            whole = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            yield "import", IMPORTS, (name, *origin, *whole)
    elif not is_idle(node):
        targets = _targets(node)
        name = ", ".join(map(_source, targets)) or _source(node)
        if not all(isinstance(target, ast.Name) for target in targets):
            name += " ="  # it replaces something that is defined elsewhere
        yield "statement", " ".join(name.split())[:_NAMED], shape(node)


def _targets(node: ast.stmt) -> Iterable[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, (ast.AnnAssign, ast.AugAssign)) else []


def _source(node: ast.AST | None) -> str:
    try:
        return "" if node is None else ast.unparse(node)
    except RecursionError:
        return f"line {getattr(node, 'lineno', 0)}"


def _same(was: _Part, now: _Part) -> bool:
    if was.kind == now.kind == "import":
        return set(was.shapes) == set(now.shapes)
    return was.shapes == now.shapes


def _set_aside(was: _Part | None, now: _Part | None) -> bool:
    """Whether nothing that runs can depend on a change, but a log."""
    if not any(part.runs for part in (was, now) if part):
        return True
    return bool(was and now and was.kind == "function" and was.quiet == now.quiet)


def _only_more(before: Module, was: _Part, now: _Part) -> bool:
    """Whether imports are only new ones from modules that were imported before."""
    if not set(was.shapes) <= set(now.shapes):
        return False
    known = {origin for guards, (_, origin, *_) in was.shapes if not guards}
    words = {
        *(node.id for node in ast.walk(before.tree) if isinstance(node, ast.Name)),
        *(node.attr for node in ast.walk(before.tree) if isinstance(node, ast.Attribute)),
        *before.definitions,
        *before.imports,
    }
    return all(
        origin in known and name not in words
        for _, (name, origin, *_) in set(now.shapes) - set(was.shapes)
    )


def _runs_at_once(part: _Part) -> bool:
    """Whether importing a file runs a statement so that its place matters."""
    if part.kind == "import":
        return False
    return part.kind != "function" or any(getattr(n, "decorator_list", []) for n in part.nodes)


def _detail(before: Module, after: Module, name: str) -> str:
    was, now = before.definitions.get(name), after.definitions.get(name)
    if was is None or now is None or not _function(was) or not _function(now):
        return ""
    return compare(was, now)[1]


def _function(definition: Definition) -> bool:
    return any(isinstance(node, FUNCTION) for node in definition.nodes)


def _whole(part: _Part) -> bytes:
    return lines_of(part.data, part.nodes)


def _text(data: bytes, node: ast.AST) -> bytes:
    """The lines of a statement; of a class, those above its body."""
    if isinstance(node, ast.ClassDef):
        end = max(first_line(node.body[0]) - 1, node.lineno)
        lines = lines_of(data, [node]).split(b"\n")
        return b"\n".join(lines[: end - first_line(node) + 1]) + b"\n"
    return lines_of(data, [node])
