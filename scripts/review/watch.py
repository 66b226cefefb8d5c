"""The watch list: upstream's definitions that the overlay relies on, and what became of each.

Four kinds are watched: what our modules re-implement, by their own word in a comment
``# mirrors: vllm.module:name``; the functions that a patch stands in; the names that our modules
import, with the members of imported classes that they name; and the classes that make, override or
replace a class with a seam (:mod:`review.makers`). A function that upstream calls on its way is
not.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from overlay.errors import Exit, OverlayError
from overlay.pin import PACKAGE
from overlay.source import Overlay

from review import makers
from review.merging import JudgedPatch
from review.model import (
    BODY,
    IMPORTED,
    MAKER,
    MIRRORED,
    MOVED,
    NEW,
    PATCHED,
    SAME,
    SEAM,
    Change,
    Definition,
    Model,
    bases,
    compare,
    module_name,
    parsed,
    shape,
    unified,
)
from review.words import short

#: The word of a module that mirrors nothing.
NOTHING = "nothing"

_LINE = re.compile(r"^[ \t]*# mirrors: (.*)$", re.MULTILINE)
_NAME = re.compile(r"(vllm(?:\.\w+)*):(\w+(?:\.\w+)*)")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_OURS = PACKAGE.replace("/", ".")


@dataclass
class Watched:
    """A definition of upstream's, and why it is watched.

    Attributes:
        kind: the first reason that it has: :data:`MIRRORED` to :data:`PATCHED`.
        users: modules of ours below the package, and patches.
    """

    kind: str
    users: list[str] = field(default_factory=list)


Watch = Mapping[tuple[str, str], Watched]


def watch_list(overlay: Overlay, patches: Iterable[JudgedPatch], base: Model) -> Watch:
    """Return what is watched, by module and qualified name in the pinned release.

    Args:
        overlay: the overlay.
        patches: the series, judged; it knows the functions of its hunks.
        base: the pinned release.

    Raises:
        OverlayError: a mirrored name is not in the pinned release.
    """
    watch: dict[tuple[str, str], Watched] = {}

    def add(kind: str, found: Definition, user: str) -> None:
        known = watch.setdefault((found.module, found.name), Watched(kind))
        known.users += [user] if user not in known.users else []

    ours = list(our_modules(overlay.root))
    for path, text in ours:
        for line, word in mirrors(text):
            if word != NOTHING:
                add(MIRRORED, _mirrored(base, path, line, word), short(path))
    for found, user in seams(patches, base):
        add(SEAM, found, user)
    _add_imports(watch, ours, [found for found, _ in seams(patches, base)], base)
    return watch


def _add_imports(
    watch: dict[tuple[str, str], Watched],
    ours: Sequence[tuple[str, str]],
    holders: Iterable[Definition],
    base: Model,
) -> None:
    """Add the names that our modules import, and the members that they name of their classes.

    Args:
        watch: what is watched so far.
        ours: path and text of our modules.
        holders: definitions with seams, whose classes count as imported.
        base: the pinned release.
    """
    named = {name for _, text in ours for name in _names(text)}
    classes: dict[tuple[str, str], tuple[Definition, set[str], bool]] = {}

    def add(place: tuple[str, str], user: str) -> None:
        known = watch.setdefault(place, Watched(IMPORTED))
        known.users += [user] if user not in known.users else []

    for path, text in ours:
        for name, derived in imported(text):
            place = None if name.startswith(_OURS) else base.place(name)
            found = place and base.find(*place)
            if not place or not found:
                continue  # ours, or another distribution's
            # An alias is watched by the name that we use, so that it may lead elsewhere.
            add(place, short(path))
            if found.kind == "class":
                key = found.module, found.name
                _, users, before = classes.get(key, (found, set(), False))
                classes[key] = found, users | {short(path)}, before or derived
    for held in holders:
        outer = base.find(held.module, held.name.partition(".")[0])
        if outer and outer.kind == "class":
            classes.setdefault((outer.module, outer.name), (outer, {"the seams"}, False))
    for found, users, derived in classes.values():
        for member in _all_members(found, base):
            last = member.name.rpartition(".")[2]
            if (derived and not last.startswith("__")) or last in named:
                for user in sorted(users):
                    add((member.module, member.name), user)


def changes(
    watch: Watch,
    overlay: Overlay,
    patches: Iterable[JudgedPatch],
    sides: tuple[Model, Model],
) -> list[Change]:
    """Return what is not as it was, in the order of the kinds.

    Args:
        watch: of :func:`watch_list`.
        overlay: the overlay.
        patches: the series, judged.
        sides: the pinned release, and the one under review.
    """
    base, release = sides
    found: dict[str, Change] = {}
    for (module, name), watched in watch.items():
        before = base.find(module, name)
        assert before is not None
        change = _change(base, release, (module, name), before, watched)
        if change is not None:
            found.setdefault(change.name, change)
    holders = {(each.module, each.name) for each, _ in seams(patches, base)}
    for change in makers.compare(holders, base, release, overlay.targets):
        found.setdefault(change.name, change)
    for path in overlay.targets:
        for change in _elsewhere_in(path, base, release):
            found.setdefault(change.name, change)
    order = (MIRRORED, SEAM, IMPORTED, MAKER, PATCHED)
    return sorted(found.values(), key=lambda each: (order.index(each.kind), each.name))


def _change(
    base: Model, release: Model, place: tuple[str, str], before: Definition, watched: Watched
) -> Change | None:
    after = release.find(*place)
    if after is None and before.name:
        after = release.elsewhere(before, base)
    fate = compare(before, after)
    detail = ""  # what the diff does not show
    if after and before.full_name != after.full_name:
        detail = f"It is {after.full_name} now."
    elif after and before.kind != after.kind:
        detail = f"It was {before.kind}, and is {after.kind}."
    elif after and bases(before) != bases(after):
        detail = f"Its bases are {', '.join(bases(after)) or 'none'} now."
    # But for mirrors, a class is watched by its head, and by the members that we name.
    if fate == SAME or (fate == BODY and watched.kind != MIRRORED and before.kind == "class"):
        return None
    was, where = before.place, after.place if after else None
    diff = unified(before.text, after.text if after else "")
    name = f"{place[0]}.{place[1]}".rstrip(".")
    return Change(watched.kind, name, fate, detail, was, where, tuple(watched.users), diff)


def _elsewhere_in(path: str, base: Model, release: Model) -> Iterator[Change]:
    """Yield what else has changed in a file that the patches change, without diffs."""
    old, new = (side.module(module_name(path)) for side in (base, release))
    assert old is not None
    yield from _members_changed(old, new or parsed(path, ""), base, release)
    if _statements(base.text(path)) != _statements(release.text(new.path) if new else ""):
        place = f"{path}:1"
        yield Change(PATCHED, f"{old.module} (statements)", BODY, "", place, place, ())


def _members_changed(
    old: Definition, new: Definition, base: Model, release: Model
) -> Iterator[Change]:
    before = {each.name: each for each in old.members()}
    after = {each.name: each for each in new.members()}
    for name in dict.fromkeys([*before, *after]):
        one, other = before.get(name), after.get(name)
        if one is None:
            assert other is not None
            yield Change(PATCHED, f"{old.module}.{name}", NEW, "", None, other.place, ())
            continue
        fate = compare(one, other)
        if fate in (SAME, MOVED):
            continue
        if other is not None and fate == BODY and one.kind == "class":
            yield from _members_changed(one, other, base, release)
            continue
        now = other.place if other else None
        yield Change(PATCHED, one.full_name, fate, "", one.place, now, ())


def _statements(text: str) -> list[str]:
    """Return the shapes of a module's statements that define no function or class."""
    kept = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    tree = ast.parse(text)
    # Sorted imports may come in any order.
    lines = [shape(ast.unparse(node)) for node in tree.body if not isinstance(node, kept)]
    return sorted(line for line in lines if not line.startswith("Module(body=[Expr(value=Constant"))


# What is watched


def our_modules(root: Path) -> Iterator[tuple[str, str]]:
    """Yield path below ``vendor_overlay`` and text of each of our modules."""
    folder = root / "vendor_overlay"
    for file in sorted((folder / PACKAGE).rglob("*.py")):
        yield file.relative_to(folder).as_posix(), file.read_text()


def mirrors(text: str) -> list[tuple[int, str]]:
    """Return the line and the word of each ``# mirrors:`` comment of a module."""
    return [
        (text.count("\n", 0, match.start()) + 1, match[1].strip()) for match in _LINE.finditer(text)
    ]


def _mirrored(base: Model, path: str, line: int, word: str) -> Definition:
    match = _NAME.fullmatch(word)
    if match is None:
        raise _refusal(path, f"line {line}: mirrors {word!r}, which is no name of upstream's")
    found = base.find(match[1], match[2]) if match[1] in base.paths else None
    if found is None:
        raise _refusal(path, f"line {line}: mirrors {word}, which is not in the pinned release")
    return found


def _refusal(path: str, problem: str) -> OverlayError:
    return OverlayError(
        Exit.FAULT,
        problem,
        subject=f"vendor_overlay/{path}" if "/" in path else f"readiness.{path}",
        next_step="write `# mirrors: vllm.module:name` or import a name of the pinned release",
    )


def seams(patches: Iterable[JudgedPatch], base: Model) -> Iterator[tuple[Definition, str]]:
    """Yield each function or class of the pinned release that a patch stands in, and the patch."""
    for judged in patches:
        for file in judged.files:
            for hunk in file.hunks:
                found = hunk.function and base.find(_module(base, file.path), hunk.function)
                if found:
                    yield found, judged.patch.name


def _module(base: Model, path: str) -> str:
    return next((name for name, known in base.paths.items() if known == path), "")


def imported(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the dotted name of each import from vLLM, and whether a class of ours derives from it.

    Names under TYPE_CHECKING count: they say which classes are used.
    """
    tree = ast.parse(text)
    derived = {
        ast.unparse(base)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for base in node.bases
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
            for alias in node.names:
                yield f"{node.module}.{alias.name}", (alias.asname or alias.name) in derived
        elif isinstance(node, ast.Import):
            yield from ((a.name, False) for a in node.names if f"{a.name}.".startswith("vllm."))


def _names(text: str) -> Iterator[str]:
    """Yield every attribute, keyword and text of a module that may be a member of upstream's."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and _IDENTIFIER.fullmatch(str(node.value)):
            yield str(node.value)


def _all_members(found: Definition, model: Model) -> Iterator[Definition]:
    """Yield the members of a class, inherited ones included."""
    seen: set[str] = set()
    left = [found]
    while left:
        one = left.pop(0)
        for member in one.members():
            last = member.name.rpartition(".")[2]
            if last not in seen:
                seen.add(last)
                yield member
        for dotted in bases(one):
            place = model.place(dotted)
            inherited = place and model.find(*place)
            left += [inherited] if inherited else []
