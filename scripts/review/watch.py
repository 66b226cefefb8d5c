"""The watch list: upstream's definitions that the overlay relies on, and those that have changed.

Three kinds are watched: what our modules re-implement, as their comments say
(``# mirrors: vllm.module:name``); the functions that a patch stands in; and the names that our
modules import, with the members of imported classes that they name. A function that upstream calls
on its way is not watched.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from overlay.errors import Exit, OverlayError
from overlay.pin import PACKAGE
from overlay.source import Overlay

from review.merging import JudgedPatch
from review.model import Model, Object, module_name, shape, text_of, unified

#: Why a definition is watched; the first two need a person if it has changed.
MIRRORED, SEAM, IMPORTED = "mirrored", "seam", "imported"
DECIDE = (MIRRORED, SEAM)
#: The word of a module that mirrors nothing.
NOTHING = "nothing"

_LINE = re.compile(r"^[ \t]*# mirrors: (.*)$", re.MULTILINE)
_NAME = re.compile(r"(vllm(?:\.\w+)*):(\w+(?:\.\w+)*)")
_OURS = PACKAGE.replace("/", ".")

#: By dotted name of a definition of upstream's: the first reason that it is watched for, and its
#: users: modules of ours, and patches.
Watch = Mapping[str, tuple[str, list[str]]]


@dataclass(frozen=True)
class Change:
    """A watched definition that has changed.

    Attributes:
        kind: why it is watched.
        name: dotted, as the pinned release has it.
        users: modules of ours below the package, and patches.
        places: file and line in the pinned release and in the other; None where it is not.
        diff: lines of a unified diff; none for a module.
    """

    kind: str
    name: str
    users: tuple[str, ...]
    places: tuple[str | None, ...]
    diff: tuple[str, ...]


def watch_list(overlay: Overlay, patches: Iterable[JudgedPatch], base: Model) -> Watch:
    """Return what is watched in the pinned release.

    Raises:
        OverlayError: a mirrored name is not in the pinned release.
    """
    watch: dict[str, tuple[str, list[str]]] = {}

    def add(kind: str, name: str, user: str) -> None:
        _, users = watch.setdefault(name, (kind, []))
        users += [user] if user not in users else []

    ours = [(p, overlay.origin_of(p).read_text()) for p in overlay.added if p.endswith(".py")]
    named = {name for _, text in ours for name in _names(text)}
    for path, text in ours:
        for line, word in mirrors(text):
            if word != NOTHING:
                add(MIRRORED, _mirrored(base, path, line, word).path, _short(path))
    for judged in patches:
        for path, function in judged.functions:
            if function and (found := base.find(f"{module_name(path)}.{function}")):
                add(SEAM, found.path, judged.patch.name)
    for path, text in ours:
        for name, derived in _imported(text):
            if name.startswith(_OURS) or not (used := base.find(name)):
                continue
            # An alias is watched by the name that we use, so that it may lead elsewhere.
            add(IMPORTED, name, _short(path))
            for inner, member in base.members(used).items() if used.is_class else ():
                if (derived and not inner.startswith("__")) or inner in named:
                    add(IMPORTED, member.path, _short(path))
    return watch


def changes(watch: Watch, base: Model, release: Model) -> list[Change]:
    """Return what has changed, in the order of the kinds."""
    found = []
    for name, (kind, users) in watch.items():
        sides = base.find(name), release.find(name)
        # But for mirrors, a class is watched by its head, and by the members that we name.
        head = kind != MIRRORED
        before, after = (each and (each.kind, shape(text_of(each), head)) for each in sides)
        if before != after:
            places = tuple(f"{e.filepath}:{e.lineno or 1}" if e else None for e in sides)
            diff = tuple(unified(*map(text_of, sides)))
            found.append(Change(kind, name, tuple(users), places, diff))
    order = (MIRRORED, SEAM, IMPORTED)
    return sorted(found, key=lambda each: (order.index(each.kind), each.name))


# What is watched


def _short(path: str) -> str:
    return module_name(path).removeprefix(_OURS).lstrip(".")


def mirrors(text: str) -> list[tuple[int, str]]:
    """Return the line and the word of each ``# mirrors:`` comment of a module."""
    return [
        (text.count("\n", 0, match.start()) + 1, match[1].strip()) for match in _LINE.finditer(text)
    ]


def _mirrored(base: Model, path: str, line: int, word: str) -> Object:
    match = _NAME.fullmatch(word)
    found = match and base.find(".".join(match.groups()))
    if not found:
        which = "is not in the pinned release" if match else "is no name of upstream's"
        raise OverlayError(
            Exit.FAULT,
            f"line {line}: mirrors {word!r}, which {which}",
            subject=f"vendor_overlay/{path}",
            next_step="write `# mirrors: vllm.module:name` or import a name of the pinned release",
        )
    return found


def _imported(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the dotted name of each import from vLLM, and whether a class of ours derives from it.

    Names under TYPE_CHECKING count: they say which classes are used.
    """
    nodes = list(ast.walk(ast.parse(text)))
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    derived = {ast.unparse(base) for node in classes for base in node.bases}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
            for alias in node.names:
                yield f"{node.module}.{alias.name}", (alias.asname or alias.name) in derived
        elif isinstance(node, ast.Import):
            yield from ((a.name, False) for a in node.names if f"{a.name}.".startswith("vllm."))


def _names(text: str) -> Iterator[str]:
    """Yield every attribute and text of a module that may be a member of upstream's."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and str(node.value).isidentifier():
            yield str(node.value)
