"""Who makes, derives from, or replaces the classes and functions that hold a seam.

Only names are read: in each module, calls, bases, assignments and texts that lead to such a class
through the module's imports. The review reports differences and does not judge them.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache

from review import model as models
from review.model import ASSIGNED, BODY, MAKER, SAME, Change, Model, Object, members, text_of

MAKES, DERIVES, REPLACES, NAMES = "makes", "derives from", "replaces", "names"
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
#: Nodes without others, which are most of a tree.
_LEAVES = (ast.Name, ast.expr_context, ast.operator, ast.cmpop, ast.boolop, ast.unaryop)


def compare(
    holders: Iterable[Object], base: Model, release: Model, patched: Collection[str]
) -> Iterator[Change]:
    """Yield the definitions around the classes with seams that differ.

    Args:
        holders: functions and classes of the pinned release with seams.
        base: the pinned release.
        release: the one under review.
        patched: paths of files that the patches change, which the watch list has whole.
    """
    targets = {outermost(each).path for each in holders}
    methods = {each.name for each in holders if outermost(each) is not each}
    made = uses(targets, base)
    makers = [base.find(place) for place, how in made.items() if MAKES in how]
    owners = {each.parent.path for each in makers if each and each.parent and each.parent.is_class}
    # Files with the same text in both releases make no difference.
    there = set(release.paths.values())
    same = {p for p in base.paths.values() if p in there and base.text(p) == release.text(p)}
    every = targets | owners | _derived(made)
    before, after = (uses(every, side, same) for side in (base, release))
    while more := _derived(after) - every:  # classes derived from a derived one
        every |= more
        before, after = (uses(every, side, same) for side in (base, release))
    for place in dict.fromkeys([*before, *after]):
        old, new = (side.get(place, {}) for side in (before, after))
        pair = base.find(place), release.find(place)
        if any(each and str(each.filepath) in patched for each in pair):
            continue
        users = tuple(sorted({*old.values(), *new.values()}))
        if MAKES in old and pair[0] is not None:
            if (fate := models.compare(*pair)) != SAME:
                yield Change(MAKER, place, fate, pair, users, f"It {_how(old)}.")
            yield from _setters(pair[0], release, users)
        elif old.keys() != new.keys():
            if new.keys() == {DERIVES} and not _overrides(pair[1], methods):
                continue
            text = f"It {_how(new)}." if new else f"It no longer {_how(old)}."
            fate = BODY if all(pair) else models.compare(*pair)
            yield Change(MAKER, place, fate, pair, users, text)


def outermost(definition: Object) -> Object:
    """Return the class or function of a module that a definition is in; a module itself."""
    while definition.parent and not definition.parent.is_module:
        definition = definition.parent
    return definition


def _derived(made: Mapping[str, Mapping[str, str]]) -> set[str]:
    return {place for place, how in made.items() if DERIVES in how}


def _setters(maker: Object, release: Model, users: tuple[str, ...]) -> Iterator[Change]:
    """Yield the other methods of a maker's class that set an attribute that it sets, if new."""
    attributes = set(ASSIGNED.findall(text_of(maker)))
    owner = maker.parent
    if owner is None or not owner.is_class or (now := release.find(owner.path)) is None:
        return
    before = members(owner)
    for name, member in members(now).items():
        old = before.get(name)
        had = ASSIGNED.findall(text_of(old) if old else "")
        new = attributes.intersection(ASSIGNED.findall(text_of(member))).difference(had)
        if name != maker.name and member.is_function and new:
            detail = f"It sets {', '.join(sorted(new))}, as {models.name_of(maker)} does."
            fate = models.compare(old, member)
            yield Change(MAKER, member.path, fate, (old, member), users, detail)


def uses(
    targets: Collection[str], model: Model, without: Collection[str] = ()
) -> dict[str, dict[str, str]]:
    """Return by definition how it uses the targets: a verb, and the target.

    Args:
        targets: classes and functions, by dotted name.
        model: of the release.
        without: paths of files that are not read.
    """
    found: dict[str, dict[str, str]] = {}
    pairs = [each.rpartition(".") for each in targets]
    modules, names = ({each[at] for each in pairs} for at in (0, 2))

    def target(dotted: str, verb: str) -> str:
        """Return the target that a dotted name leads to, or nothing."""
        if dotted in modules:
            return dotted if verb != MAKES else ""
        place = None if names.isdisjoint(dotted.split(".")) else model.place(dotted)
        head, _, rest = place[1].partition(".") if place else ("", "", "")
        if place is None or head not in names or (verb == MAKES and rest):
            return ""
        led = model.find(f"{place[0]}.{head}")
        if verb == MAKES and not (led and led.is_class):
            return ""
        ways = (f"{place[0]}.{head}", led.path if led else "")
        return next((each for each in ways if each in targets), "")

    for module, path in model.paths.items():
        text = "" if path in without else model.text(path)
        if not any(part in text for part in modules | names):
            continue
        for scope, verb, dotted in _mentions(module, text):
            if led := target(dotted, verb):
                # Of a class that derives, and of a function within, the outermost one counts.
                depth = 2 if verb == MAKES else 1
                place = ".".join([module, *scope.split(".")[:depth]]).rstrip(".")
                found.setdefault(place, {})[verb] = led
    return found


@cache
def _mentions(module: str, text: str) -> Sequence[tuple[str, str, str]]:
    """Return scope, verb and dotted name of each use in a module of what may be vLLM's."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return ()
    imports = {n.name: f"{module}.{n.name}" for n in tree.body if isinstance(n, ast.ClassDef)}
    found: list[tuple[str, str, ast.AST]] = []

    def visit(node: ast.AST, scope: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, _LEAVES):
                continue
            if isinstance(child, ast.ImportFrom) and child.module and not child.level:
                for alias in child.names:
                    imports[alias.asname or alias.name] = f"{child.module}.{alias.name}"
            elif isinstance(child, ast.Import):
                imports.update({a.asname: a.name for a in child.names if a.asname})
            inner = f"{scope}.{child.name}".lstrip(".") if isinstance(child, _SCOPES) else scope
            found.extend((inner, verb, each) for verb, each in _candidates(child))
            visit(child, inner)

    visit(tree, "")
    named = ((scope, verb, _dotted(each, imports)) for scope, verb, each in found)
    return tuple(dict.fromkeys(each for each in named if each[2].startswith("vllm.")))


def _dotted(node: ast.AST, imports: Mapping[str, str]) -> str:
    """Return what a name, an attribute or a text leads to; empty for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    head = [imports.get(node.id, node.id)] if isinstance(node, ast.Name) else [""]
    return ".".join(head + parts[::-1])


def _candidates(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield the expressions of one node that may lead to a target, each with a verb."""
    if isinstance(node, ast.ClassDef):
        yield from ((DERIVES, base) for base in node.bases)
    elif isinstance(node, ast.Call):
        sets = isinstance(node.func, ast.Name) and node.func.id == "setattr" and node.args
        yield (REPLACES, node.args[0]) if sets else (MAKES, node.func)
    elif isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from ((REPLACES, each) for each in targets if isinstance(each, ast.Attribute))
    elif isinstance(node, ast.Constant):
        yield NAMES, node


def _overrides(found: Object | None, methods: Collection[str]) -> bool:
    """Return whether a derived class has a method with a seam, or a base that may have one."""
    if found is None or not found.is_class:
        return True
    return len(models.bases(found)) > 1 or not members(found).keys().isdisjoint(methods)


def _how(how: Mapping[str, str]) -> str:
    return ", and ".join(f"{verb} {target}" for verb, target in sorted(how.items()))
