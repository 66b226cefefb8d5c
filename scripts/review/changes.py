"""Changes to a definition between two releases: its fate, and a sentence that says why.

Comments, docstrings and layout do not count.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from review.definitions import ASSIGNMENT, FUNCTION, Definition, Definitions, Module
from review.trees import shape

#: Fates of a definition, from the least to the worst.
FATES = ("same", "body", "signature", "moved", "gone")

#: Classes whose base ends so have members that are assigned; others' fields are annotated.
_ENUMERATIONS = ("Enum", "Flag")
#: Characters of an expression that a sentence quotes.
_QUOTED = 120
#: The share of top-level names that makes two modules one that moved.
_ALIKE = 0.5
#: With more pairs of changed lines than this, lines are counted without regard to their order.
_PAIRS = 1 << 20


@dataclass(frozen=True)
class Change:
    """The fate of a definition.

    Attributes:
        fate: one of :data:`FATES`.
        now: its place in the release; None if it is gone.
        detail: a sentence, or nothing.
        found: the definition in the release; None if it is gone.
    """

    fate: str
    now: str | None
    detail: str
    found: Definition | None = field(default=None, compare=False)


def change(base: Definitions, release: Definitions, module: str, name: str) -> Change:
    """Follow a name from the base release to another.

    Args:
        base: the release that has it.
        release: the one that may have it.
        module: where our code finds it, which may import it from elsewhere.
        name: qualified; empty for the module itself.
    """
    before = base.find(module, name)
    assert before is not None
    after = release.find(module, name)
    if after is not None:
        fate, detail = compare(before, after)
        if _identity(before) == _identity(after):
            return Change(fate, after.place, detail, after)
        where = f"it is {after.full_name} now"
        still = "the old name still works" if name or before.path != after.path else ""
        return Change("moved", after.place, _sentence(where, still, detail), after)
    candidates = _new_places(base, release, before)
    if (before.module, before.name) != (module, name):  # the name was imported there
        origin = release.find(before.module, before.name)
        candidates = [origin] if origin is not None else candidates
    if len(candidates) == 1:
        (after,) = candidates
        _, detail = compare(before, after)
        where = f"it is {after.full_name} now"
        return Change("moved", after.place, _sentence(where, detail), after)
    if candidates:
        names = ", ".join(candidate.full_name for candidate in candidates[:3])
        return Change("gone", None, f"New ones of that name: {names}.")
    renamed = _renamed(base, release, before)
    return Change("gone", None, f"{renamed.full_name} has the same body." if renamed else "")


def compare(before: Definition, after: Definition) -> tuple[str, str]:
    """Compare a definition with its successor.

    Returns:
        "same", "body" or "signature", and a sentence on the difference.
    """
    if _category(before) != _category(after):
        return "signature", f"It was a {_category(before)}, and is a {_category(after)}."
    old, new = signature(before), signature(after)
    if old != new:
        return "signature", _sentence(_signature_change(old, new))
    old, new = _body(before), _body(after)
    if old == new:
        return "same", ""
    if _category(before) == "attribute":
        pairs = ((old, new), (new, old))
        was, now = (" and ".join(map(_short, _without(*pair))) or "nothing" for pair in pairs)
        return "body", f"Where it was assigned {was}, it is {now} now."
    removed, added = _line_counts(old, new)
    return "body", f"Statements: {removed} of {len(old)} are gone, {added} are new."


def signature(definition: Definition) -> list[str]:
    """The parts of a definition that its users depend on, beside its body.

    Returns:
        Decorators, bases, fields, parameters and annotations, each with the word for it.
    """
    return [part for node in definition.nodes for part in _signature(node)]


def _category(definition: Definition) -> str:
    """The kind as a reader sees it: a property is not just an attribute."""
    function = any(isinstance(node, FUNCTION) for node in definition.nodes)
    return "property" if definition.kind == "attribute" and function else definition.kind


def _body(definition: Definition) -> list[str]:
    """The lines of a function, or the values that are assigned to an attribute."""
    if definition.kind in ("module", "class"):
        return []
    texts = [text for node in definition.nodes for text in _body_lines(node)]
    return sorted(texts) if _category(definition) == "attribute" else texts


def _identity(definition: Definition) -> tuple[str, str, str]:
    # A module that has become a package is another file under the same name.
    return definition.module, definition.name, definition.path


def _new_places(base: Definitions, release: Definitions, before: Definition) -> list[Definition]:
    """The definitions of that name in modules where the base has none."""
    if not before.name:
        return _moved_modules(base, release, before)
    outer, _, last = before.name.rpartition(".")
    places = []
    for name in release.with_name(outer.rpartition(".")[2] or last):
        module, was = release.module(name), base.module(name)
        if module is None or (was is not None and before.name in was.definitions):
            continue
        if before.name in module.definitions:
            places.append(module.definitions[before.name])
    return places


def _moved_modules(base: Definitions, release: Definitions, before: Definition) -> list[Definition]:
    """The new module with the same last name that is most like a module, if one is."""
    was = base.module(before.module)
    assert was is not None
    names = {name for name in was.definitions if "." not in name}
    best: tuple[float, Module] | None = None
    for name in release.paths:
        if name.rpartition(".")[2] != before.module.rpartition(".")[2] or name in base.paths:
            continue
        module = release.module(name)
        if module is None or not names:
            continue
        share = len(names & set(module.definitions)) / len(names)
        if share >= _ALIKE and (best is None or share > best[0]):
            best = share, module
    return [Definition("module", best[1].name, "", best[1].path, 1)] if best else []


def _renamed(base: Definitions, release: Definitions, before: Definition) -> Definition | None:
    """A new name in the same scope with the same body."""
    module, was = release.module(before.module), base.module(before.module)
    category, body = _category(before), _body(before)
    if module is None or was is None or category == "attribute" or not body:
        return None
    scope = before.name.rpartition(".")[0]
    for name, candidate in module.definitions.items():
        new = name.rpartition(".")[0] == scope and name not in was.definitions
        if new and _category(candidate) == category and _body(candidate) == body:
            return candidate
    return None


def _signature(node: ast.AST) -> Iterator[str]:
    if isinstance(node, (ast.ClassDef, *FUNCTION)):
        for decorator in node.decorator_list:
            yield f"@{_unparsed(decorator)}"
    if isinstance(node, ast.ClassDef):
        for base in (*node.bases, *node.keywords):
            yield f"base {_unparsed(base)}"
        members = any(_unparsed(base).endswith(_ENUMERATIONS) for base in node.bases)
        for statement in node.body:
            if isinstance(statement, (ast.Assign, ast.AnnAssign) if members else ast.AnnAssign):
                yield f"field {_unparsed(statement)}"
    elif isinstance(node, FUNCTION):
        if isinstance(node, ast.AsyncFunctionDef):
            yield "async"
        yield from _parameters(node.args)
        if node.returns is not None:
            yield f"returns {_unparsed(node.returns)}"
    elif isinstance(node, ast.AnnAssign):
        yield f"annotated {_unparsed(node.annotation)}"


def _parameters(arguments: ast.arguments) -> Iterator[str]:
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    for index, (argument, default) in enumerate(zip(positional, defaults, strict=True)):
        yield _parameter(argument, default)
        if index + 1 == len(arguments.posonlyargs):
            yield "parameter /"
    if arguments.vararg or arguments.kwonlyargs:
        yield f"parameter *{_unparsed(arguments.vararg) if arguments.vararg else ''}"
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _parameter(argument, default)
    if arguments.kwarg:
        yield f"parameter **{_unparsed(arguments.kwarg)}"


def _parameter(node: ast.arg, default: ast.expr | None) -> str:
    value = "" if default is None else f" = {_unparsed(default)}"
    return f"parameter {_unparsed(node)}{value}"


def _body_lines(node: ast.AST) -> Iterator[str]:
    if isinstance(node, FUNCTION):
        for statement in node.body:
            yield from _unparsed(statement).splitlines()
    elif isinstance(node, ASSIGNMENT) and node.value is not None:
        yield _unparsed(node.value)


def _signature_change(old: list[str], new: list[str]) -> str:
    """The difference of two signatures, in words."""
    phrases = [f"{_short(text)} is gone" for text in _without(old, new)]
    phrases += [f"{_short(text)} is new" for text in _without(new, old)]
    shifted = [text for was, text in zip(old, new, strict=False) if was != text]
    return "; ".join(phrases) or f"another order: {_short(', '.join(shifted))}"


def _line_counts(old: Sequence[str], new: Sequence[str]) -> tuple[int, int]:
    """How many lines are gone, and how many are new."""
    start, most = 0, min(len(old), len(new))
    while start < most and old[start] == new[start]:
        start += 1
    end = 0
    while end < most - start and old[-1 - end] == new[-1 - end]:
        end += 1
    old, new = old[start : len(old) - end], new[start : len(new) - end]
    if len(old) * len(new) > _PAIRS:
        return len(_without(old, new)), len(_without(new, old))
    blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    kept = sum(block.size for block in blocks)
    return len(old) - kept, len(new) - kept


def _without(texts: Iterable[str], others: Iterable[str]) -> list[str]:
    """The texts that are not among the others, each as often as it is missing there."""
    left = Counter(others)
    kept = []
    for text in texts:
        if left[text]:
            left[text] -= 1
        else:
            kept.append(text)
    return kept


def _unparsed(node: ast.AST) -> str:
    """The source of a tree; of one that is nested too deep for that, something as distinctive."""
    try:
        return ast.unparse(node)
    except RecursionError:
        digest = hashlib.sha256(repr(shape(node)).encode()).hexdigest()
        return f"an expression nested too deep to be shown, {digest[:12]}"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _QUOTED else text[: _QUOTED - 1] + "…"


def _sentence(*parts: str) -> str:
    kept = [part.rstrip(".") for part in parts if part]
    text = "; ".join([kept[0], *(part[:1].lower() + part[1:] for part in kept[1:])])
    return text[:1].upper() + text[1:] + "."
