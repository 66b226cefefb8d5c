"""Whether the candidate is sound: it compiles, its names exist, and none of them is two things.

A merge of lines knows nothing of Python. What the release's own file has does not count, nor what
the overlay has on the release that it is for.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tempfile
import warnings as python_warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from overlay.errors import Exit, OverlayError
from series.tree import write_file
from series.upstream import Upstream

from review.merging import Merged
from review.pieces import code, escape, row

#: ruff's rules: undefined names, a local variable read before it is set, and a definition that
#: replaces another one which nothing has used.
_RULES = "F821,F823,F811"
_QUOTED = re.compile(r"`([^`]+)`")
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
_COLUMNS = ("file", "line", "what is wrong")


def examine(merged: Merged, base: Upstream, release: Upstream) -> list[dict[str, Any]]:
    """Look at every file that merges.

    Args:
        merged: the series on the release.
        base: the pinned release.
        release: the one under review.

    Returns:
        A finding for each fault: "path", "line", "kind" ("syntax", "name" or "collision"),
        "name" (empty for a syntax error), and "text".

    Raises:
        OverlayError: ruff cannot be run.
    """
    theirs = {path: release.read(path) for path in sorted(set(merged.texts) - merged.conflicts)}
    # A file that this Python cannot compile in the release either says nothing of the merge.
    theirs = {path: text for path, text in theirs.items() if _fault(path, text) is None}
    changed = {p: merged.texts[p] for p, text in theirs.items() if merged.texts[p] != text}
    faults = {path: _fault(path, text) for path, text in changed.items()}
    findings = [fault for fault in faults.values() if fault]
    whole = {path: text for path, text in changed.items() if not faults[path]}
    collisions = [
        finding
        for path, text in whole.items()
        for finding in _collisions(path, base.read(path), merged.overlaid[path], theirs[path], text)
    ]
    known = {(finding["path"], finding["name"]) for finding in collisions}
    names = _undefined(theirs, merged.overlaid, whole)
    named = [finding for finding in names if (finding["path"], finding["name"]) not in known]
    return sorted([*findings, *collisions, *named], key=lambda each: (each["path"], each["line"]))


def warnings(findings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A warning for each finding of :func:`examine`."""
    for each in findings:
        yield f"the candidate is not ready: {each['path']}, line {each['line']}: {each['text']}"


def section(
    findings: Sequence[Mapping[str, Any]],
) -> tuple[str, str, Sequence[str], list[str]]:
    """Heading, anchor, columns and rows, as :func:`review.sections.of_findings` yields them."""
    rows = [
        row(code(each["path"], True), str(each["line"]), escape(each["text"])) for each in findings
    ]
    return f"The candidate is not ready: {len(rows):,} faults", "soundness", _COLUMNS, rows


# Compiling


def _fault(path: str, text: bytes) -> dict[str, Any] | None:
    """Why a module does not compile, or None."""
    try:
        with python_warnings.catch_warnings():
            python_warnings.simplefilter("ignore")
            compile(text, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        return _finding(path, error.lineno or 1, "syntax", "", f"it does not compile: {error.msg}")
    except (ValueError, RecursionError, MemoryError) as error:
        return _finding(path, 1, "syntax", "", f"it does not compile: {error}")
    return None


def _finding(path: str, line: int, kind: str, name: str, text: str) -> dict[str, Any]:
    return {"path": path, "line": line, "kind": kind, "name": name, "text": text}


# Names


def _undefined(
    release: Mapping[str, bytes], overlaid: Mapping[str, bytes], candidate: Mapping[str, bytes]
) -> Iterator[dict[str, Any]]:
    """What ruff says of the candidate's files, and more often than of the release's and of ours."""
    if not candidate:
        return
    sides = {"release": release, "overlaid": overlaid, "candidate": candidate}
    with tempfile.TemporaryDirectory(prefix="overlay-ruff-") as scratch:
        folder = Path(scratch).resolve()
        for side, texts in sides.items():
            for path in candidate:
                write_file(folder / side / path, texts[path])
        found = {side: list(_ruff(folder / side)) for side in sides}
    # Lines move; what is said of them does, too, where it quotes their numbers.
    old: Counter[tuple[str, str]] = Counter()
    for side in ("release", "overlaid"):
        old |= Counter((path, _unnumbered(text)) for path, _, text in found[side])
    for path, line, text in found["candidate"]:
        if old[path, _unnumbered(text)]:
            old[path, _unnumbered(text)] -= 1
            continue
        name = _QUOTED.search(text)
        yield _finding(path, line, "name", name[1] if name else "", text)


def _ruff(folder: Path) -> Iterator[tuple[str, int, str]]:
    """Path, line and sentence of each of ruff's findings in a directory."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--quiet"]
    command += ["--exit-zero", "--select", _RULES, "--output-format", "json", "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    try:
        entries = json.loads(done.stdout)
    except ValueError:
        reason = done.stderr.strip().rpartition("\n")[2]
        raise OverlayError(
            Exit.FAULT,
            f"ruff cannot be run: {reason}",
            next_step="run `make tools`, which installs it",
        ) from None
    for entry in entries:
        # What is no rule's, such as a syntax that its Python has not, was compiled above.
        if entry["code"] in _RULES.split(","):
            path = Path(entry["filename"]).relative_to(folder).as_posix()
            yield path, entry["location"]["row"], f"{entry['message']} ({entry['code']})"


def _unnumbered(text: str) -> str:
    return re.sub(r"\bline \d+", "line", text)


# Collisions


def _collisions(
    path: str, base: bytes, overlaid: bytes, release: bytes, candidate: bytes
) -> Iterator[dict[str, Any]]:
    """Names that the patches put into a scope, and the release does now, too."""
    before, ours, theirs = (set(_bound(text)) for text in (base, overlaid, release))
    there, both = _bound(release), _bound(candidate)
    # Of a function that is new on both sides, its own name says enough.
    scopes = {"", *(f"{scope}.{name}".removeprefix(".") for scope, name in before)}
    for scope, name in sorted((ours - before) & (theirs - before)):
        # If the release has taken our lines over, the merge holds them once.
        if scope in scopes and len(both[scope, name]) > len(there[scope, name]):
            where = scope or "the module"
            text = f"a patch puts {name} into {where}, and the release has one of its own there now"
            yield _finding(path, both[scope, name][-1], "collision", name, text)


def _bound(text: bytes) -> dict[tuple[str, str], list[int]]:
    """The lines at which each name of each scope is bound; an attribute of self is its class's."""
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return {}
    lines: dict[tuple[str, str], list[int]] = {}
    for scope, name, line in _bindings(module, "", "", ""):
        lines.setdefault((scope, name), []).append(line)
    return lines


def _bindings(node: ast.AST, scope: str, own: str, owner: str) -> Iterator[tuple[str, str, int]]:
    """Scope, name and line of each binding below a node.

    Args:
        node: whose children are searched.
        scope: of these children.
        own: the name by which a method knows its object.
        owner: that object's class.
    """
    for child in ast.iter_child_nodes(node):
        inside = (scope, own, owner)
        if isinstance(child, (*_FUNCTION, ast.ClassDef)):
            yield scope, child.name, child.lineno
            inner = f"{scope}.{child.name}" if scope else child.name
            first = child.args.args[:1] if isinstance(child, _FUNCTION) else []
            method = isinstance(node, ast.ClassDef) and bool(first)
            inside = (inner, first[0].arg, scope) if method else (inner, own, owner)
        elif isinstance(child, (ast.Import, ast.ImportFrom)):
            for alias in child.names:
                yield scope, alias.asname or alias.name.partition(".")[0], child.lineno
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield scope, child.id, child.lineno
        elif isinstance(child, ast.arg):
            yield scope, child.arg, child.lineno
        elif isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
            if owner and isinstance(child.value, ast.Name) and child.value.id == own:
                yield owner, child.attr, child.lineno
        yield from _bindings(child, *inside)
