"""What is called from the seams and by what we call, and has changed in another release.

Calls are followed two levels deep through the sources of the pinned release: from functions that
hold a seam, from upstream's functions that our modules call or re-implement, and from the methods
that our classes inherit. A function that sets an attribute that we use is one of ours to read,
too. With each function go the constants of modules and classes that it names.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from overlay.pin import PACKAGE
from overlay.source import Overlay
from series.upstream import Upstream

from review.calls import Calls, Reference
from review.definitions import FUNCTION, Definition, Definitions, is_static
from review.findings import COLUMNS, Finding, finding, listed, module_of_ours, rows
from review.mirrors import Mirror
from review.trees import definition_shape, shape
from review.uses import Use

#: How far calls are followed.
LEVELS = 2

#: How the reason begins for a function that sets an attribute.
_SETS = "sets "
#: What pydantic's Field takes to limit the values of a setting.
_LIMITS = ("ge", "gt", "le", "lt")


@dataclass(frozen=True)
class Root:
    """A function of upstream's from which calls are followed.

    Attributes:
        reference: the function.
        why: what it has to do with us.
        ours: our modules, or seams.
        looked_at: False if its own change is reported here, because nothing of ours names it.
        followed: whether its calls are; the constants that it names are read in any case.
    """

    reference: Reference
    why: str
    ours: tuple[str, ...]
    looked_at: bool = True
    followed: bool = True


@dataclass(frozen=True)
class _Reached:
    """A function that is followed.

    Attributes:
        reference: the function, class or constant.
        root: where the chain began.
        chain: full names of the functions between, the root first.
    """

    reference: Reference
    root: Root
    chain: tuple[Definition, ...]


def examine(
    roots: Sequence[Root], base: Definitions, release: Definitions, known: Collection[str]
) -> list[Finding]:
    """What of the callees has changed, moved or gone.

    Args:
        roots: those of :func:`roots_of`.
        base: the release that the overlay is for.
        release: the one under review.
        known: full names of definitions whose change is shown elsewhere.

    Returns:
        The entries under "callees" in review.json.

    Raises:
        OverlayError: a source cannot be parsed, or git fails.
    """
    findings = []
    for reached in _follow(roots, Calls(base)):
        reference = reached.reference
        definition = reference.definition
        if definition.full_name in known:
            continue
        place = reference.module, reference.name
        if release.find(*place) is None:
            # A caller that has changed shows that it calls something else.
            if reached.chain and _changed(reached.chain[-1], release):
                continue
            place = definition.module, definition.name
        if _same_default(definition, release.find(*place)):
            continue
        # The constructors of a class that is called are followed by themselves.
        why, ours = _why(reached), reached.root.ours
        found = finding(base, release, place, definition, why, ours, whole=False)
        if found is not None:
            findings.append(found)
    # Those that only set what we use come last.
    return sorted(findings, key=lambda found: found["why"].startswith(_SETS))


def roots_of(
    uses: Iterable[Use],
    mirrors: Iterable[tuple[Mirror, Definition]],
    inherited: Iterable[tuple[Definition, str]],
    base: Definitions,
) -> list[Root]:
    """The functions from which calls are followed, those that concern us most first.

    Args:
        uses: those of :func:`review.uses.upstream_uses`.
        mirrors: those of :func:`review.mirrors.resolve`.
        inherited: those of :func:`inherited_methods`.
        base: the release that the overlay is for.
    """
    grouped: dict[tuple[str, tuple[str, str]], list[Use]] = {}
    for use in uses:
        if use.certain and use.how in ("holds a seam", "called", "read", "set"):
            grouped.setdefault((use.how, use.places[0]), []).append(use)
    roots = []
    for word in ("holds a seam", "called"):
        for (how, place), group in grouped.items():
            definition = base.find(*place)
            if how == word and definition is not None and definition.kind == "function":
                ours = tuple(sorted({_file(use.user) for use in group}))
                why = "holds a seam" if how == "holds a seam" else f"called by {_named(ours)}"
                roots.append(Root(Reference(*place, definition), why, ours))
    for mirror, definition in mirrors:
        why = f"mirrored by {module_of_ours(mirror.ours)}"
        reference = Reference(definition.module, definition.name, definition)
        roots.append(Root(reference, why, (mirror.ours,)))
    for definition, path in inherited:
        reference = Reference(definition.module, definition.name, definition)
        why = f"inherited by {module_of_ours(path)}"
        roots.append(Root(reference, why, (path,), looked_at=False))
    for (how, place), group in grouped.items():
        definition = base.find(*place)
        if how in ("read", "set") and definition is not None and definition.kind == "attribute":
            ours = tuple(sorted({_file(use.user) for use in group}))
            for setter in _setters(definition, base):
                reference = Reference(setter.module, setter.name, setter)
                why = f"{_SETS}{definition.full_name}, used by {_named(ours)}"
                roots.append(Root(reference, why, ours, looked_at=False, followed=False))
    return roots


def inherited_methods(overlay: Overlay, base: Upstream) -> Iterator[tuple[Definition, str]]:
    """The methods that our classes have from upstream's, each with the file of our class."""
    folder = overlay.root / "vendor_overlay"
    ours = sorted(path.relative_to(folder).as_posix() for path in (folder / PACKAGE).rglob("*.py"))
    upstreams = set(base.paths)

    def read(path: str) -> bytes:
        return base.read(path) if path in upstreams else (folder / path).read_bytes()

    both = Definitions(Upstream(tuple(sorted({*base.paths, *ours})), read))
    pristine = Definitions.of(base)
    for path in ours:
        module = both.module(path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
        if module is None:
            continue
        for own in [each for each in module.definitions.values() if each.kind == "class"]:
            taken = {name for name in module.definitions if name.startswith(f"{own.name}.")}
            seen = {name.rpartition(".")[2] for name in taken}
            for cls in both.bases_of(own.module, own.name):
                origin = pristine.module(cls.module)
                for name, definition in origin.definitions.items() if origin else ():
                    outer, _, last = name.rpartition(".")
                    method = any(isinstance(node, FUNCTION) for node in definition.nodes)
                    if outer == cls.name and method and last not in seen:
                        seen.add(last)
                        yield definition, path


def warnings(findings: Sequence[Finding]) -> Iterator[str]:
    """What needs eyes."""
    if findings:
        yield (
            f"{len(findings)} definitions have changed that are called from the seams, or by what "
            f"we call, inherit or mirror: {listed([found['what'] for found in findings])}"
        )


def section(
    findings: Sequence[Finding], versions: tuple[str, str]
) -> tuple[str, str, Sequence[str], list[str]]:
    """Heading, anchor, columns and rows; the versions are of the base and of the release."""
    return f"Callees: {len(findings):,} changed", "callees", COLUMNS, rows(findings, versions)


def _follow(roots: Iterable[Root], calls: Calls) -> Iterator[_Reached]:
    """Everything within reach, each once, by the shortest chain."""
    seen: set[str] = set()
    followed: set[str] = set()
    front: list[_Reached] = []
    last: list[_Reached] = []
    for root in roots:
        reached = _Reached(root.reference, root, ())
        name = root.reference.definition.full_name
        if not root.looked_at and name not in seen:
            seen.add(name)
            yield reached
        (front if root.followed else last).append(reached)
    # Behind the last functions only the constants that they name are of interest.
    for level in range(LEVELS + 1):
        ahead = []
        for caller in front if level < LEVELS else [*front, *last]:
            definition = caller.reference.definition
            if definition.full_name in followed:
                continue
            followed.add(definition.full_name)
            for reference in calls.references(definition):
                name = reference.definition.full_name
                if level == LEVELS and not _constant(reference.definition):
                    continue
                reached = _Reached(reference, caller.root, (*caller.chain, definition))
                if name not in seen:
                    seen.add(name)
                    yield reached
                ahead.append(reached)
        front = ahead


def _same_default(before: Definition, after: Definition | None) -> bool:
    """Whether a setting's value has only got limits: those refuse values, and change none."""
    if after is None or not before.kind == after.kind == "attribute":
        return False
    sides = [
        [shape(*_parts(node)) for node in definition.nodes if is_static(node)]
        for definition in (before, after)
    ]
    return bool(sides[0]) and sides[0] == sides[1]


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """The annotation and the value of a setting, without limits; another node as it is."""
    if not isinstance(node, ast.AnnAssign) or node.value is None:
        yield node
        return
    value = node.value
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "Field" and not value.args:
        given = {keyword.arg: keyword.value for keyword in value.keywords}
        if "default" in given and given.keys() <= {"default", *_LIMITS}:
            value = given["default"]
    yield from (node.annotation, value)


def _constant(definition: Definition) -> bool:
    return definition.kind == "attribute" and not any(
        isinstance(node, FUNCTION) for node in definition.nodes
    )


def _changed(definition: Definition, release: Definitions) -> bool:
    after = release.find(definition.module, definition.name)
    return after is None or definition_shape(definition) != definition_shape(after)


def _why(reached: _Reached) -> str:
    if not reached.chain:
        return reached.root.why
    names = [definition.full_name.removeprefix("vllm.") for definition in reached.chain]
    verb = "reads" if _constant(reached.reference.definition) else "calls"
    *between, last = names
    chain = "".join(f"{name} calls " for name in between)
    return f"{chain}{last} {verb} it; {names[0]}: {reached.root.why}"


def _setters(attribute: Definition, base: Definitions) -> Iterator[Definition]:
    """The methods that assign an attribute of an instance."""
    module, owner = base.module(attribute.module), attribute.name.rpartition(".")[0]
    for method in module.definitions.values() if module is not None and owner else ():
        if method.name.rpartition(".")[0] == owner:
            spans = [node for node in method.nodes if isinstance(node, FUNCTION)]
            if any(
                span.lineno < line <= (span.end_lineno or 0)
                for span in spans
                for line in (int(getattr(node, "lineno", 0)) for node in attribute.nodes)
            ):
                yield method


def _file(user: str) -> str:
    return user.rpartition(":")[0]


def _named(files: Iterable[str]) -> str:
    return ", ".join(map(module_of_ours, files))
