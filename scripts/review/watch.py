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
from collections.abc import Iterable, Iterator, Mapping

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
    PATCHED,
    SAME,
    SEAM,
    Change,
    Model,
    Object,
    bases,
    compare,
    kind_of,
    members,
    module_name,
    parsed,
    shape,
)

#: The word of a module that mirrors nothing.
NOTHING = "nothing"

_LINE = re.compile(r"^[ \t]*# mirrors: (.*)$", re.MULTILINE)
_NAME = re.compile(r"(vllm(?:\.\w+)*):(\w+(?:\.\w+)*)")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_OURS = PACKAGE.replace("/", ".")


#: By dotted name of a definition of upstream's: the first reason that it is watched for
#: (:data:`MIRRORED` to :data:`PATCHED`), and its users: modules of ours, and patches.
Watch = Mapping[str, tuple[str, list[str]]]


def watch_list(overlay: Overlay, patches: Iterable[JudgedPatch], base: Model) -> Watch:
    """Return what is watched in the pinned release.

    Args:
        overlay: the overlay.
        patches: the series, judged; it knows the functions of its hunks.
        base: the pinned release.

    Raises:
        OverlayError: a mirrored name is not in the pinned release.
    """
    watch: dict[str, tuple[str, list[str]]] = {}

    def add(kind: str, name: str, user: str) -> None:
        _, users = watch.setdefault(name, (kind, []))
        users += [user] if user not in users else []

    def add_members(found: Object, derived: bool, user: str) -> None:
        for name, member in _all_members(found, base).items() if found.is_class else ():
            if (derived and not name.startswith("__")) or name in named:
                add(IMPORTED, member.path, user)

    ours = [(p, overlay.origin_of(p).read_text()) for p in overlay.added if p.endswith(".py")]
    named = {name for _, text in ours for name in _names(text)}
    for path, text in ours:
        for line, word in mirrors(text):
            if word != NOTHING:
                add(MIRRORED, _mirrored(base, path, line, word).path, short(path))
    held = list(seams(patches, base))
    for found, patch in held:
        add(SEAM, found.path, patch)
    for path, text in ours:
        for name, derived in imported(text):
            used = None if name.startswith(_OURS) else base.find(name)
            if used:
                # An alias is watched by the name that we use, so that it may lead elsewhere.
                add(IMPORTED, name, short(path))
                add_members(used, derived, short(path))
    known = set(watch)
    for outer in {each.path: each for each in (makers.outermost(one) for one, _ in held)}.values():
        if outer.path not in known:
            add_members(outer, False, "the seams")
    return watch


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
    holders = [each for each, _ in seams(patches, base)]
    found = [
        *(_changed(name, *watched, sides) for name, watched in watch.items()),
        *makers.compare(holders, base, release, overlay.targets),
        *(each for path in overlay.targets for each in _elsewhere_in(path, sides)),
    ]
    # Of several changes of one definition, the first has the best reason.
    named = {each.name: each for each in reversed(found) if each}
    order = (MIRRORED, SEAM, IMPORTED, MAKER, PATCHED)
    return sorted(named.values(), key=lambda each: (order.index(each.kind), each.name))


def _changed(name: str, kind: str, users: list[str], sides: tuple[Model, Model]) -> Change | None:
    base, release = sides
    before, after = base.find(name), release.find(name)
    assert before is not None
    if after is None and not before.is_module:
        after = release.elsewhere(before, base)
    fate = compare(before, after)
    # But for mirrors, a class is watched by its head, and by the members that we name.
    if fate == SAME or (fate == BODY and kind != MIRRORED and before.is_class):
        return None
    detail = ""  # what the diff does not show
    if after and before.path != after.path:
        detail = f"It is {after.path} now."
    elif after and kind_of(before) != kind_of(after):
        detail = f"It was {kind_of(before)}, and is {kind_of(after)}."
    elif after and bases(before) != bases(after):
        detail = f"Its bases are {', '.join(bases(after)) or 'none'} now."
    return Change(kind, name, fate, (before, after), tuple(users), detail)


def _elsewhere_in(path: str, sides: tuple[Model, Model]) -> Iterator[Change]:
    """Yield what else has changed in a file that the patches change."""
    old, new = (side.module(module_name(path)) for side in sides)
    assert old is not None
    new = new or parsed(path, "")
    yield from _members_changed(old, new)
    if _statements(sides[0].text(path)) != _statements(sides[1].text(str(new.filepath))):
        yield Change(PATCHED, f"{old.path} (statements)", BODY, (old, new))


def _members_changed(old: Object, new: Object) -> Iterator[Change]:
    before, after = members(old), members(new)
    for name in dict.fromkeys([*before, *after]):
        one, other = before.get(name), after.get(name)
        fate = compare(one, other)
        if one and other and fate == BODY and one.is_class:
            yield from _members_changed(one, other)
        elif fate != SAME:
            yield Change(PATCHED, f"{old.path}.{name}", fate, (one, other))


def _statements(text: str) -> list[str]:
    """Return the shapes of a module's statements that define no function or class."""
    kept = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    tree = ast.parse(text)
    # Sorted imports may come in any order.
    lines = [shape(ast.unparse(node)) for node in tree.body if not isinstance(node, kept)]
    return sorted(line for line in lines if not line.startswith("Module(body=[Expr(value=Constant"))


# What is watched


def short(path: str) -> str:
    """Return the name of one of our modules below the package, from its path."""
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


def seams(patches: Iterable[JudgedPatch], base: Model) -> Iterator[tuple[Object, str]]:
    """Yield each function or class of the pinned release that a patch stands in, and the patch."""
    for judged in patches:
        for hunk in judged.hunks:
            name = f"{module_name(hunk.path)}.{hunk.function}"
            if hunk.function and (found := base.find(name)):
                yield found, judged.patch.name


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


def _all_members(found: Object, model: Model) -> dict[str, Object]:
    """Return the members of a class by name, inherited ones included."""
    inherited: dict[str, Object] = {}
    for dotted in bases(found):
        if base := model.find(dotted):
            inherited = _all_members(base, model) | inherited
    return inherited | members(found)
