"""Who makes, derives from, or replaces the classes and functions that hold a seam.

Only names are read: in each module, calls, bases, assignments and texts that lead to such a class
through the module's imports. The review reports differences and does not judge them.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache

from review.model import ASSIGNED, BODY, MAKER, SAME, Change, Definition, Model
from review.model import compare as compared

Place = tuple[str, str]
MAKES, DERIVES, REPLACES, NAMES = "makes", "derives from", "replaces", "names"
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
#: Nodes without others, which are most of a tree.
_LEAVES = (ast.Name, ast.expr_context, ast.operator, ast.cmpop, ast.boolop, ast.unaryop)


def compare(
    holders: Collection[Place], base: Model, release: Model, patched: Collection[str]
) -> Iterator[Change]:
    """Yield the definitions around the classes with seams that differ.

    Args:
        holders: functions and classes with seams, by module and qualified name.
        base: the pinned release.
        release: the one under review.
        patched: paths of files that the patches change, which the watch list has whole.
    """
    targets = {(module, name.partition(".")[0]) for module, name in holders}
    methods = {name.rpartition(".")[2] for _, name in holders if "." in name}
    made = uses(targets, base)
    named = {
        (module, name.partition(".")[0])
        for (module, name), how in made.items()
        if MAKES in how and "." in name
    }
    # Files with the same text in both releases make no difference.
    there = set(release.paths.values())
    same = {p for p in base.paths.values() if p in there and base.text(p) == release.text(p)}
    every = targets | named | _derived(made)
    before, after = (uses(every, side, same) for side in (base, release))
    while more := _derived(after) - every:  # classes derived from a derived one
        every |= more
        before, after = (uses(every, side, same) for side in (base, release))
    for place in dict.fromkeys([*before, *after]):
        old, new = (side.get(place, {}) for side in (before, after))
        pair = base.find(*place), release.find(*place)
        if any(each and each.path in patched for each in pair):
            continue
        users = tuple(sorted({*old.values(), *new.values()}))
        name = ".".join(place).rstrip(".")
        if MAKES in old and pair[0] is not None:
            if (fate := compared(*pair)) != SAME:
                yield Change(MAKER, name, fate, pair, users, f"It {_how(old)}.")
            yield from _setters(place, pair[0], (base, release), users)
        elif old.keys() != new.keys():
            if new.keys() == {DERIVES} and not _overrides(pair[1], methods):
                continue
            text = f"It {_how(new)}." if new else f"It no longer {_how(old)}."
            yield Change(MAKER, name, BODY if all(pair) else compared(*pair), pair, users, text)


def _derived(made: Mapping[Place, Mapping[str, str]]) -> set[Place]:
    return {place for place, how in made.items() if DERIVES in how}


def _setters(
    place: Place, maker: Definition, sides: tuple[Model, Model], users: tuple[str, ...]
) -> Iterator[Change]:
    """Yield the other methods of a maker's class that set an attribute that it sets, if new."""
    attributes = set(ASSIGNED.findall(maker.text))
    owners = [side.find(place[0], place[1].rpartition(".")[0]) for side in sides]
    if not attributes or None in owners or "." not in place[1]:
        return
    before, after = ({each.name: each for each in owner.members()} for owner in owners if owner)
    for name, member in after.items():
        old = before.get(name)
        new = set(ASSIGNED.findall(member.text)) - set(ASSIGNED.findall(old.text if old else ""))
        if name != place[1] and member.kind == "function" and new & attributes:
            detail = f"It sets {', '.join(sorted(new & attributes))}, as {maker.name} does."
            fate = compared(old, member)
            yield Change(MAKER, member.full_name, fate, (old, member), users, detail)


def uses(
    targets: Collection[Place], model: Model, without: Collection[str] = ()
) -> dict[Place, dict[str, str]]:
    """Return by definition how it uses the targets: a verb, and the target's dotted name.

    Args:
        targets: classes and functions, by module and name.
        model: of the release.
        without: paths of files that are not read.
    """
    found: dict[Place, dict[str, str]] = {}
    parts = {part for place in targets for part in place}
    for module, path in model.paths.items():
        text = "" if path in without else model.text(path)
        if not any(part in text for part in parts):
            continue
        for scope, verb, dotted in _mentions(module, text):
            target, rest = _target(dotted, targets, model)
            if target is None or (verb == MAKES and (rest or not _is_class(target, model))):
                continue
            # Of a class that derives, and of a function within, the outermost one counts.
            place = ".".join(scope.split(".")[:2]) if verb == MAKES else scope.partition(".")[0]
            found.setdefault((module, place), {})[verb] = ".".join(target).rstrip(".")
    return found


def _target(dotted: str, targets: Collection[Place], model: Model) -> tuple[Place | None, str]:
    """Return the target that a dotted name leads to, and what follows it."""
    modules, names = {module for module, _ in targets}, {name for _, name in targets}
    if dotted in modules:
        return (dotted, ""), ""
    if names.isdisjoint(dotted.split(".")) or (place := model.place(dotted)) is None:
        return None, ""
    head, _, rest = place[1].partition(".")
    if head not in names or not head:
        return None, ""
    if (place[0], head) in targets:
        return (place[0], head), rest
    found = model.find(place[0], head)
    known = found is not None and (found.module, found.name) in targets
    return ((found.module, found.name) if found and known else None), rest


def _is_class(place: Place, model: Model) -> bool:
    found = model.find(*place)
    return found is not None and found.kind == "class"


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


def _overrides(found: Definition | None, methods: Collection[str]) -> bool:
    """Return whether a derived class has a method with a seam, or a base that may have one."""
    if found is None or not found.name or found.kind != "class":
        return True
    bases = getattr(found.object, "bases", ())
    return len(bases) > 1 or any(m.name.rpartition(".")[2] in methods for m in found.members())


def _how(how: Mapping[str, str]) -> str:
    return ", and ".join(f"{verb} {target}" for verb, target in sorted(how.items()))
